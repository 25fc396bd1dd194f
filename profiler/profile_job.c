// The profiling run, first half: calibration texts become token ids, counted and checked before the model runs. Also
// finds what a finished record has of them already, and whether this machine reproduces that record's numbers.
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/record_growth.h"
#include "formats/sha256.h"
#include "profiler/profile.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct id_list {
    int32_t *ids;
    size_t n;
} id_list;

static void append_known_ids(id_list *out, const int32_t *ids, size_t n)
{
    out->ids = need_more(out->ids, out->n + n, sizeof *out->ids, "token ids");
    if (n) memcpy(out->ids + out->n, ids, n * sizeof *ids);
    out->n += n;
}

static kvb_status append_text(id_list *out, const model_text *t, text_part part, const char *text, kvb_error *err)
{
    int32_t *ids = NULL;
    size_t n = 0;
    kvb_status status = model_text_encode(t, part, text, strlen(text), &ids, &n, err);
    if (status == KVB_OK) append_known_ids(out, ids, n);
    free(ids);
    return status;
}

static kvb_status append_ids(id_list *out, const model_text *t, const int32_t *ids, size_t n, kvb_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= t->vocabulary)
            return kvb_fail(err, KVB_ARGUMENT,
                            "id %d at place %zu, expected 0 to %u; were the ids made with another model's tokenizer?",
                            ids[i], i, t->vocabulary - 1);
    append_known_ids(out, ids, n);
    return KVB_OK;
}

// Collects the context's ids, BOS first if the rule says so. Ids given by the user are taken as they are.
static kvb_status context_ids(id_list *out, const model_text *t, const calib_context *c, const profile_options *o,
                              kvb_error *err)
{
    if (c->context_ids && t->chat.kind)
        return kvb_fail(err, KVB_ARGUMENT,
                        "--chat wraps texts, but this context is given as token ids; leave out --chat");
    if (c->context_ids) return append_ids(out, t, c->context_ids, c->n_context_ids, err);
    int32_t bos = t->special.bos;
    if (o->bos == BOS_YES && bos < 0)
        return kvb_fail(err, KVB_ARGUMENT, "the model has no BOS token, but --bos yes asks for it");
    if (o->bos == BOS_YES || (o->bos == BOS_AS_MODEL && model_text_begins_with_bos(t))) {
        kvb_status status = append_ids(out, t, &bos, 1, err);
        if (status != KVB_OK) return status;
    }
    return append_text(out, t, TEXT_CONTEXT, c->context, err);
}

// Question and answer prefix are encoded as one text. A chat template itself says where the answer begins, so the
// prefix that is usual without one is left out.
static kvb_status suffix_ids(id_list *out, const model_text *t, const calib_context *c, const calib_question *q,
                             kvb_error *err)
{
    if (q->ids && t->chat.kind)
        return kvb_fail(err, KVB_ARGUMENT, "--chat wraps texts, but it is given as token ids; leave out --chat");
    if (q->ids) return append_ids(out, t, q->ids, q->n_ids, err);
    int32_t *ids = NULL;
    size_t n = 0;
    bool left_out = t->chat.kind && !c->has_answer_prefix;
    kvb_status status = model_text_encode_question(t, q->text, left_out ? "" : c->answer_prefix, &ids, &n, err);
    if (status == KVB_OK) append_known_ids(out, ids, n);
    free(ids);
    return status;
}

static kvb_status prepare_question(profile_question *out, const model_text *t, const calib_context *c,
                                   const calib_question *q, const profile_options *o, kvb_error *err)
{
    id_list suffix = {0}, answer = {0};
    kvb_status status = suffix_ids(&suffix, t, c, q, err);
    if (status == KVB_OK && !o->ignore_answers && q->answer_ids)
        status = append_ids(&answer, t, q->answer_ids, q->n_answer_ids, err);
    else if (status == KVB_OK && !o->ignore_answers && q->answer)
        status = append_text(&answer, t, TEXT_ALONE, q->answer, err);
    if (status == KVB_OK && suffix.n == 0) status = kvb_fail(err, KVB_ARGUMENT, "the question has no tokens");
    if (status == KVB_OK && (suffix.n > INT32_MAX / 2 || answer.n > INT32_MAX / 2))
        status = kvb_fail(err, KVB_ARGUMENT, "question and answer have %zu tokens, too many", suffix.n + answer.n);
    if (status != KVB_OK) {
        free_all(suffix.ids, answer.ids);
        return status;
    }
    // An answer's last token is never a query. The tokenizer decides how many tokens a text has, so a short answer is
    // not an error: it is sampled, as if none were given.
    bool is_short = answer.ids && answer.n + o->include_first < 2;
    if (is_short) free(answer.ids), answer = (id_list){0};
    *out = (profile_question){.suffix = suffix.ids,
                              .n_suffix = (uint32_t)suffix.n,
                              .answer = answer.ids,
                              .n_answer = (uint32_t)answer.n,
                              .was_short = is_short};
    out->tail = out->n_suffix + (answer.ids ? out->n_answer : o->new_tokens) - 1;
    return KVB_OK;
}

static kvb_status prepare_context(profile_context *out, const model *m, const model_text *t, const calib_context *c,
                                  const profile_options *o, kvb_error *err)
{
    id_list ids = {0};
    char hash[65];
    kvb_status status = context_ids(&ids, t, c, o, err);
    out->ids = ids.ids;
    if (status == KVB_OK && o->max_tokens && ids.n > o->max_tokens) ids.n = o->max_tokens;
    uint32_t most = o->beyond_trained ? PROFILE_MAX_TOKENS : m->config.context_length;
    if (status == KVB_OK && (ids.n == 0 || ids.n > most))
        status =
            kvb_fail(err, KVB_ARGUMENT, "the context has %zu tokens, expected 1 to %u (%s); --max-tokens N cuts it%s",
                     ids.n, most, o->beyond_trained ? "more is not supported" : "the model's context length",
                     o->beyond_trained ? "" : ", --beyond-trained allows it");
    for (size_t i = 0; status == KVB_OK && i < o->n_metrics; i++)
        status = metric_check_tokens(&o->metrics[i], ids.n, err);
    if (status != KVB_OK) return status;
    sha256_hex(c->sample_id, strlen(c->sample_id), hash);
    snprintf(out->id, sizeof out->id, "%s", c->sample_id);
    hash[16] = 0;
    out->key = strtoull(hash, NULL, 16);
    out->n_tokens = (uint32_t)ids.n;
    size_t n = o->max_questions && c->n_questions > o->max_questions ? o->max_questions : c->n_questions;
    out->questions = need(n, sizeof *out->questions, "questions");
    for (out->n_questions = 0; out->n_questions < n; out->n_questions++) {
        status = prepare_question(&out->questions[out->n_questions], t, c, &c->questions[out->n_questions], o, err);
        if (status != KVB_OK) {
            kvb_error inner = err ? *err : (kvb_error){0};
            return kvb_fail(err, status, "question %u: %s", out->n_questions + 1, inner.message);
        }
        out->n_given += out->questions[out->n_questions].answer != NULL;
    }
    return KVB_OK;
}

static void free_context(profile_context *c)
{
    for (uint32_t q = 0; c->questions && q < c->n_questions; q++)
        free_all(c->questions[q].suffix, c->questions[q].answer);
    free_all(c->questions, c->ids);
}

// ---- Growing a record -----------------------------------------------------------------------------------------------

typedef kvb_status (*ids_reader)(record *r, size_t context, size_t question, int32_t *out, kvb_error *err);

// Sets *same to whether a list of ids in the record is this one.
static kvb_status same_ids(bool *same, record *r, size_t context, size_t question, ids_reader read, uint32_t n_held,
                           const int32_t *ids, uint32_t n, kvb_error *err)
{
    *same = n == n_held;
    if (!*same || !n) return KVB_OK;
    int32_t *held = need(n, sizeof *held, "token ids");
    kvb_status status = read(r, context, question, held, err);
    *same = status == KVB_OK && memcmp(held, ids, n * sizeof *ids) == 0;
    free(held);
    return status;
}

static kvb_status read_record_tokens(record *r, size_t context, size_t question, int32_t *out, kvb_error *err)
{
    (void)question;
    return record_read_tokens(r, context, out, err);
}

static kvb_status match_question(const profile_context *c, record *r, size_t at, uint32_t q, kvb_error *err)
{
    const record_question_info *held = &record_context(r, at)->questions[q];
    const profile_question *given = &c->questions[q];
    bool suffix = false, answer = true;
    kvb_status status =
        same_ids(&suffix, r, at, q, record_read_suffix, held->n_suffix, given->suffix, given->n_suffix, err);
    if (status == KVB_OK && given->answer)
        status = same_ids(&answer, r, at, q, record_read_answer, held->n_answer, given->answer, given->n_answer, err);
    if (status != KVB_OK || (held->number == q && suffix && answer)) return status;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: sample %s: %s %u is another one there; give its questions as they were, and new ones behind "
                    "them",
                    record_path(r), c->id, held->number == q && suffix ? "the answer to question" : "question", q + 1);
}

// Compares a context of the files with what the record has under its name, if anything.
static kvb_status match_context(profile_context *c, record *r, kvb_error *err)
{
    size_t at = record_find(r, c->id);
    const record_context_info *held = record_context(r, at);
    if (!held) return KVB_OK;
    bool same;
    kvb_status status = same_ids(&same, r, at, 0, read_record_tokens, held->n_tokens, c->ids, c->n_tokens, err);
    if (status == KVB_OK && !same)
        return kvb_fail(err, KVB_MISMATCH, "%s: has another text for sample %s; give this one a sample_id of its own",
                        record_path(r), c->id);
    c->recorded = true;
    c->n_recorded = c->n_questions < held->n_questions ? c->n_questions : held->n_questions;
    for (uint32_t q = 0; q < c->n_recorded && status == KVB_OK; q++) status = match_question(c, r, at, q, err);
    return status;
}

static uint32_t given_among(const profile_context *c, uint32_t first, uint32_t end)
{
    uint32_t n = 0;
    for (uint32_t q = first; q < end; q++) n += c->questions[q].answer != NULL;
    return n;
}

// Whether the files hold everything that the record has. Then they alone say what it is made of.
static bool covers(const profile_job *job, const record *r)
{
    size_t covered = 0;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        const record_context_info *held = record_context(r, record_find(r, c->id));
        covered += held && c->n_recorded == held->n_questions;
    }
    return covered == record_context_count(r);
}

static kvb_status relate(profile_job *job, const record *r, kvb_error *err)
{
    profile_growth *g = &job->growth;
    uint64_t given_then = 0, given_new = 0;
    bool more = false;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        more |= c->n_questions > c->n_recorded;
        given_then += given_among(c, 0, c->n_recorded);
        given_new += given_among(c, c->n_recorded, c->n_questions);
    }
    g->relation = !more ? RECORD_SAME_TEXTS : covers(job, r) ? RECORD_ALL_TEXTS : RECORD_NEW_TEXTS;
    const cJSON *held = cJSON_GetObjectItemCaseSensitive(record_attributes(r), "given_answers");
    if (g->relation == RECORD_ALL_TEXTS && cJSON_IsNumber(held) && held->valuedouble != (double)given_then)
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: was made with %.0f given answers, of the same questions the files now have %llu",
                        record_path(r), held->valuedouble, (unsigned long long)given_then);
    if (g->relation == RECORD_NEW_TEXTS) job->n_given = given_new;
    return KVB_OK;
}

// Lists the larger record's contexts: in the files' order if they have all, else new ones behind the record's.
static void list_ids(profile_job *job, const record *r)
{
    profile_growth *g = &job->growth;
    size_t n = record_context_count(r), n_own = 0;
    g->ids = need(n + job->n_contexts, sizeof *g->ids, "context ids");
    g->own = need(job->n_contexts, sizeof *g->own, "context ids");
    if (g->relation != RECORD_ALL_TEXTS)
        for (size_t i = 0; i < n; i++) g->ids[g->n_ids++] = record_context(r, i)->id;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        if (c->recorded && g->relation == RECORD_ALL_TEXTS)
            g->ids[g->n_ids++] = record_context(r, record_find(r, c->id))->id;
        if (c->recorded) continue;
        memcpy(g->own[n_own], c->id, sizeof *g->own);
        g->ids[g->n_ids++] = g->own[n_own++];
    }
}

// Returns how much it costs to compute a metric again: sums over all attention weights and norms of outputs are
// expensive. 0 means that the metric looks at no activations, so comparing it proves nothing.
static unsigned witness_cost(const metric *m)
{
    unsigned needs = metric_needs(m), cost = 0;
    for (unsigned item = 1; item <= VIEW_OUTPUT_NORMS; item *= 2)
        if (needs & item) cost += item & (VIEW_COLUMN_SUMS | VIEW_OUTPUT_NORMS) ? 8 : 1;
    return cost;
}

// Finds which of the options' metrics the record has, and its witness: the cheapest of them that proves something.
static kvb_status sort_metrics(profile_job *job, const profile_options *o, kvb_error *err)
{
    profile_growth *g = &job->growth;
    const record_context_info *first = record_context(o->grows, 0);
    uint32_t known = 0;
    g->witness = o->n_metrics;
    for (size_t i = 0; first && i < o->n_metrics; i++) {
        if (!record_has_metric(first, o->metrics[i].spec)) continue;
        g->recorded |= UINT64_C(1) << i;
        known++;
        unsigned cost = witness_cost(&o->metrics[i]);
        if (cost && (g->witness == o->n_metrics || cost < witness_cost(&o->metrics[g->witness]))) g->witness = i;
    }
    bool new_text = false;
    for (size_t i = 0; i < job->n_contexts; i++) new_text |= !job->contexts[i].recorded;
    for (uint32_t m = 0; first && new_text && known < first->n_metrics && m < first->n_metrics; m++) {
        size_t i = 0;
        while (i < o->n_metrics && strcmp(o->metrics[i].spec, first->metrics[m]) != 0) i++;
        if (i == o->n_metrics)
            return kvb_fail(err, KVB_ARGUMENT,
                            "%s: has metric %s, so a text that is added needs its scores; give it with --metric (a "
                            "ranking as learned=FILE)",
                            record_path(o->grows), first->metrics[m]);
    }
    return KVB_OK;
}

// Makes a context from the record: its tokens, and no question.
static kvb_status take_recorded(profile_context *out, record *r, size_t at, const profile_options *o, kvb_error *err)
{
    const record_context_info *held = record_context(r, at);
    *out = (profile_context){.n_tokens = held->n_tokens, .recorded = true};
    snprintf(out->id, sizeof out->id, "%s", held->id);
    out->ids = need(held->n_tokens, sizeof *out->ids, "token ids");
    kvb_status status = record_read_tokens(r, at, out->ids, err);
    for (size_t i = 0; status == KVB_OK && i < o->n_metrics; i++) {
        status = metric_check_tokens(&o->metrics[i], held->n_tokens, err);
        if (status != KVB_OK) {
            kvb_error inner = err ? *err : (kvb_error){0};
            status = kvb_fail(err, status, "sample %s: %s", held->id, inner.message);
        }
    }
    return status;
}

// Adds the record's contexts that are in none of the files, for a metric that is added to all contexts.
static kvb_status add_recorded(profile_job *job, const profile_options *o, kvb_error *err)
{
    size_t n = record_context_count(o->grows), given = job->n_contexts;
    profile_context *larger = need_more(job->contexts, given + n, sizeof *larger, "contexts");
    job->contexts = larger;
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        size_t k = 0;
        while (k < given && strcmp(larger[k].id, record_context(o->grows, i)->id) != 0) k++;
        if (k == given) status = take_recorded(&larger[job->n_contexts++], o->grows, i, o, err);
    }
    return status;
}

static void drop_finished(profile_job *job, bool metrics_done)
{
    size_t kept = 0;
    for (size_t i = 0; i < job->n_contexts; i++) {
        profile_context *c = &job->contexts[i];
        if (c->recorded && metrics_done && c->n_questions == c->n_recorded) free_context(c);
        else job->contexts[kept++] = *c;
    }
    job->n_contexts = kept;
}

// Chooses the record's shortest text as a check if the run would otherwise prefill only new ones.
static kvb_status choose_check(profile_job *job, const profile_options *o, kvb_error *err)
{
    size_t best = 0, n = record_context_count(o->grows);
    bool only_new = job->n_contexts > 0;
    for (size_t i = 0; i < job->n_contexts; i++) only_new &= !job->contexts[i].recorded;
    if (!only_new || n == 0 || job->growth.witness == o->n_metrics) return KVB_OK;
    for (size_t i = 1; i < n; i++)
        if (record_context(o->grows, i)->n_tokens < record_context(o->grows, best)->n_tokens) best = i;
    return take_recorded(&job->growth.check, o->grows, best, &(profile_options){0}, err);
}

static kvb_status grow_job(profile_job *job, const profile_options *o, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < job->n_contexts && status == KVB_OK; i++)
        status = match_context(&job->contexts[i], o->grows, err);
    if (status == KVB_OK) status = relate(job, o->grows, err);
    if (status != KVB_OK) return status;
    list_ids(job, o->grows);
    status = sort_metrics(job, o, err);
    if (status != KVB_OK) return status;
    uint64_t all = o->n_metrics < 64 ? (UINT64_C(1) << o->n_metrics) - 1 : UINT64_MAX;
    bool metrics_done = (job->growth.recorded & all) == all;
    if (!metrics_done) status = add_recorded(job, o, err);
    if (status == KVB_OK) drop_finished(job, metrics_done);
    return status == KVB_OK ? choose_check(job, o, err) : status;
}

// ---- The job --------------------------------------------------------------------------------------------------------

static bool id_is_taken(const profile_job *job, const char *id)
{
    for (size_t i = 0; i < job->n_contexts; i++)
        if (strcmp(job->contexts[i].id, id) == 0) return true;
    return false;
}

// Returns the hashes of all files, in order, with commas between them.
static char *list_files(const calib_file *files, size_t n)
{
    enum { DIGITS = 64 };
    char *list = need(n * (DIGITS + 1) + 1, 1, "characters");
    for (size_t i = 0; i < n; i++)
        sprintf(list + i * (DIGITS + 1), "%.*s%s", DIGITS, files[i].sha256, i + 1 < n ? "," : "");
    return list;
}

// Counts the recorded questions that are decoded again for the losses of new metrics: room in the batch, and rows.
static void count_recorded(profile_job *job, const profile_options *o)
{
    for (size_t i = 0; i < job->n_contexts && o->grows && o->loss_queries; i++) {
        profile_context *c = &job->contexts[i];
        const record_context_info *held = c->recorded ? record_context(o->grows, record_find(o->grows, c->id)) : NULL;
        if (!held) continue;
        if (held->n_questions > job->max_questions) job->max_questions = held->n_questions;
        for (uint32_t q = 0; q < held->n_questions; q++) {
            uint32_t tail = held->questions[q].n_suffix + held->questions[q].n_answer;
            if (tail > job->max_tail) job->max_tail = tail;
            c->n_again += tail;
        }
    }
}

static void count_job(profile_job *job, const model *m, const profile_options *o)
{
    job->max_contexts = 1;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *context = &job->contexts[i];
        uint32_t n_new = context->n_questions - context->n_recorded;
        job->n_pairs += n_new;
        job->n_context_tokens += context->n_tokens;
        job->max_tokens = context->n_tokens > job->max_tokens ? context->n_tokens : job->max_tokens;
        job->max_questions = n_new > job->max_questions ? n_new : job->max_questions;
        uint32_t longest = 0;
        for (uint32_t q = context->n_recorded; q < context->n_questions; q++) {
            job->n_rows += context->questions[q].tail;
            longest = context->questions[q].tail > longest ? context->questions[q].tail : longest;
        }
        job->max_tail = longest > job->max_tail ? longest : job->max_tail;
        job->n_beyond += (uint64_t)context->n_tokens + longest > m->config.context_length;
    }
    if (job->growth.check.n_tokens > job->max_tokens) job->max_tokens = job->growth.check.n_tokens;
    if (job->n_contexts && !job->n_pairs) job->max_questions = job->max_tail = 1; // nothing is decoded
    count_recorded(job, o);
}

static kvb_status check_request(const model *m, const profile_options *o, kvb_error *err)
{
    if (model_budgeted(&m->config, m->config.n_layers) == 0)
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "%s: every layer has a window of %u positions, so no cache grows beyond it and there is nothing "
            "to budget",
            m->config.name, m->config.window);
    if (o->n_metrics > PROFILE_MAX_METRICS)
        return kvb_fail(err, KVB_ARGUMENT, "%zu metrics in one pass, at most %d; profile the others in a second one",
                        o->n_metrics, PROFILE_MAX_METRICS);
    return KVB_OK;
}

// One line of a calibration file becomes the job's next context.
static kvb_status add_context_line(profile_job *job, const model *m, const calib_file *file, const calib_context *c,
                                   const profile_options *o, kvb_error *err)
{
    kvb_error inner = {0};
    if (id_is_taken(job, c->sample_id))
        return kvb_fail(err, KVB_ARGUMENT, "%s: line %zu: sample_id %s is in two files; give each context its own",
                        file->name, c->line, c->sample_id);
    profile_context *made = &job->contexts[job->n_contexts++];
    kvb_status status = prepare_context(made, m, job->text, c, o, &inner);
    if (status != KVB_OK)
        return kvb_fail(err, status, "%s: line %zu, sample %s: %s", file->name, c->line, c->sample_id, inner.message);
    job->n_given += made->n_given;
    for (uint32_t q = 0; q < made->n_questions; q++) job->n_short += made->questions[q].was_short;
    return KVB_OK;
}

kvb_status profile_prepare(profile_job *out, const model *m, const model_text *text, const calib_file *files,
                           size_t n_files, const profile_options *o, kvb_error *err)
{
    size_t n = 0;
    *out = (profile_job){.text = text};
    kvb_status status = check_request(m, o, err);
    if (status != KVB_OK) return status;
    for (size_t i = 0; i < n_files; i++) n += files[i].count;
    out->contexts = need(n, sizeof *out->contexts, "contexts");
    out->calibration_files = list_files(files, n_files);
    // Another model is reported before its different tokens are; a plan has no hash of the model to compare.
    if (o->grows && m->sha256[0]) {
        cJSON *ignored;
        status = profile_grown_attributes(&ignored, m, out, o, err);
        cJSON_Delete(ignored);
    }
    for (size_t i = 0; i < n_files; i++)
        for (size_t k = 0; status == KVB_OK && k < files[i].count; k++)
            status = add_context_line(out, m, &files[i], &files[i].contexts[k], o, err);
    if (status == KVB_OK && o->grows) status = grow_job(out, o, err);
    if (status == KVB_OK) {
        count_job(out, m, o);
        status = profile_fit_batch(out, m, o, err);
    }
    if (status != KVB_OK) profile_job_free(out);
    return status;
}

void profile_job_free(profile_job *job)
{
    for (size_t i = 0; job->contexts && i < job->n_contexts; i++) free_context(&job->contexts[i]);
    free_all(job->contexts, job->calibration_files, job->growth.ids, job->growth.own, job->growth.check.ids);
    memset(job, 0, sizeof *job);
}

// ---- Attributes -----------------------------------------------------------------------------------------------------

// Adds a JSON object as a text attribute, and frees it.
static void add_document(cJSON *to, const char *name, cJSON *document)
{
    char *text = cJSON_PrintUnformatted(document);
    cJSON_AddStringToObject(to, name, text);
    cJSON_free(text);
    cJSON_Delete(document);
}

// Curves of refitted cuts are marked. A metric that the record has keeps its curves if texts are not added.
static void add_metrics(cJSON *to, const profile_job *job, const profile_options *o)
{
    bool same = o->grows && job->growth.relation == RECORD_SAME_TEXTS;
    cJSON *all = cJSON_CreateObject(), *held = same ? cJSON_Parse(record_text(o->grows, "metrics")) : NULL;
    for (size_t i = 0; i < o->n_metrics; i++) {
        const char *spec = o->metrics[i].spec;
        cJSON *one = metric_to_json(&o->metrics[i]), *before = cJSON_GetObjectItemCaseSensitive(held, spec);
        double refit = before ? cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(before, "refit"))
                              : (o->loss_queries ? o->refit : 0);
        if (refit > 0) json_put(one, "refit %g", refit);
        cJSON_AddItemToObject(all, spec, one);
    }
    cJSON_Delete(held);
    add_document(to, "metrics", all);
}

// Lists the layers that the record leaves out, with commas between them; "" if there are none.
static void list_bounded(char *text, size_t size, const model_config *c)
{
    size_t used = 0;
    text[0] = '\0';
    for (uint32_t l = 0; l < c->n_layers; l++)
        if (model_layer_bounded(c, l)) used += (size_t)snprintf(text + used, size - used, "%s%u", used ? "," : "", l);
}

// Adds numbers of the config that tell models of one family apart and are not part of the record's shape.
static void add_shape(cJSON *to, const model_config *c)
{
    cJSON *shape = cJSON_CreateObject();
    json_put(shape, "width %u ffn_width %u vocabulary %u context_length %u", c->width, c->ffn_width, c->vocabulary,
             c->context_length);
    if (c->n_experts) json_put(shape, "experts %u", c->n_experts);
    add_document(to, "model_shape", shape);
}

// Adds the frame's kind, and a hash of its texts, since templates of one kind differ.
static void add_chat(cJSON *to, const chat_frame *f)
{
    char hash[65] = "";
    char *both = need(strlen(f->front) + strlen(f->back) + 2, 1, "characters");
    strcpy(both, f->front);
    strcpy(both + strlen(f->front) + 1, f->back);
    sha256_hex(both, strlen(f->front) + strlen(f->back) + 2, hash);
    free(both);
    json_put(to, "chat %s chat_sha256 %s", f->kind, hash);
}

cJSON *profile_attributes(const model *m, const profile_job *job, const profile_options *o)
{
    static const char *const bos_names[] = {"auto", "yes", "no"};
    static const char *const oracle_texts[] = {
        "max over queries of attention times layer-normalised |v W_O|, max over the group",
        "mean over queries of attention times layer-normalised |(v - mean output) W_O|, mean over the group"};
    const model_text *t = job->text;
    char seed[24], bounded[6 * MODEL_MAX_LAYERS];
    list_bounded(bounded, sizeof bounded, &m->config);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)o->draw.seed);
    cJSON *a = cJSON_CreateObject();
    json_put(a, "tool_version %s architecture %s model_id %s model_sha256 %s tokenizer_sha256 %s", KVBUDGET_VERSION,
             m->config.architecture, m->config.name, m->sha256, t->tokens ? tokenizer_sha256(t->tokens) : "");
    record_set_calibration(a, job->calibration_files);
    json_put(a, "backend %s compute %s oracle %s width %u new_tokens %u given_answers %g", m->device->b->name,
             m->device->b->compute, oracle_texts[o->oracle], m->config.width, o->new_tokens, (double)job->n_given);
    json_put(a, "sampling %s temperature %g seed %s ignore_eos %d ignore_answers %d include_first %d bos %s",
             o->draw.greedy ? "greedy" : "temperature", o->draw.greedy ? 0 : o->draw.temperature, seed, o->ignore_eos,
             o->ignore_answers, o->include_first, bos_names[o->bos]);
    json_put(a, "max_tokens %u max_questions %u", o->max_tokens, o->max_questions);
    add_metrics(a, job, o);
    add_shape(a, &m->config);
    origin_describe(&m->source->origin, a);
    if (bounded[0]) json_put(a, "bounded_layers %s layer_window %u", bounded, m->config.window);
    if (t->chat.kind) add_chat(a, &t->chat);
    if (t->parse_special) cJSON_AddStringToObject(a, "special", "yes");
    return a;
}

kvb_status profile_grown_attributes(cJSON **out, const model *m, const profile_job *job, const profile_options *o,
                                    kvb_error *err)
{
    static const char *const of_texts[] = {"calibration_sha256", "calibration_files", "given_answers", "max_questions"};
    const cJSON *held = record_attributes(o->grows);
    cJSON *own = profile_attributes(m, job, o);
    for (size_t i = 0; job->growth.relation == RECORD_SAME_TEXTS && i < sizeof of_texts / sizeof *of_texts; i++) {
        const cJSON *value = cJSON_GetObjectItemCaseSensitive(held, of_texts[i]);
        cJSON_DeleteItemFromObjectCaseSensitive(own, of_texts[i]);
        if (value) cJSON_AddItemToObject(own, of_texts[i], cJSON_Duplicate(value, true));
    }
    kvb_status status =
        record_join_attributes(out, record_path(o->grows), held, "this command", own, job->growth.relation, err);
    cJSON_Delete(own);
    return status;
}

// ---- While it runs ----

bool profile_scores_metric(const profile_job *job, const profile_context *c, size_t i)
{
    return !c->recorded || i == job->growth.witness || !(job->growth.recorded >> i & 1);
}

kvb_status profile_check_witness(const profile_job *job, const profile_options *o, const profile_context *c,
                                 const float *scores, float *buffer, kvb_error *err)
{
    size_t at = record_find(o->grows, c->id);
    const char *name = o->metrics[job->growth.witness].spec;
    record_shape shape = record_get_shape(o->grows);
    size_t n = (size_t)shape.n_layers * shape.n_kv_heads * c->n_tokens;
    kvb_status status = record_read_scores(o->grows, at, name, buffer, err);
    if (status != KVB_OK || memcmp(buffer, scores, n * sizeof *scores) == 0) return status;
    double largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)scores[i] - buffer[i]));
    return kvb_fail(
        err, KVB_MISMATCH,
        "%s: sample %s: the scores of %s computed now differ by up to %.3g: the record was not made by this "
        "program on this kind of processor, and what is added would not belong to it; profile all again",
        record_path(o->grows), c->id, name, largest);
}
