// What is left to do of a job that adds to a finished record, and whether this machine continues that record's numbers.
#include "profiler/profile_growth.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Place of a context in the record; record_context_count() when it is not there.
static size_t find_recorded(const record *r, const char *id)
{
    size_t i = 0, n = record_context_count(r);
    while (i < n && strcmp(record_context(r, i)->id, id) != 0) i++;
    return i;
}

// ---- What the record has of the files ----

typedef kvb_status (*ids_reader)(record *r, size_t context, size_t question, int32_t *out, kvb_error *err);

// Whether a list of ids in the record is this one.
static kvb_status same_ids(bool *same, record *r, size_t context, size_t question, ids_reader read, uint32_t n_held,
                           const int32_t *ids, uint32_t n, kvb_error *err)
{
    *same = n == n_held;
    if (!*same || !n) return KVB_OK;
    int32_t *held = malloc(n * sizeof *held);
    if (!held) return kvb_fail(err, KVB_MEMORY, "no memory for %u tokens", n);
    kvb_status status = read(r, context, question, held, err);
    *same = status == KVB_OK && memcmp(held, ids, n * sizeof *ids) == 0;
    free(held);
    return status;
}

static kvb_status read_tokens(record *r, size_t context, size_t question, int32_t *out, kvb_error *err)
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
    size_t at = find_recorded(r, c->id);
    const record_context_info *held = record_context(r, at);
    if (!held) return KVB_OK;
    bool same;
    kvb_status status = same_ids(&same, r, at, 0, read_tokens, held->n_tokens, c->ids, c->n_tokens, err);
    if (status == KVB_OK && !same)
        return kvb_fail(err, KVB_MISMATCH, "%s: has another text for sample %s; give this one a sample_id of its own",
                        record_path(r), c->id);
    c->recorded = true;
    c->n_recorded = c->n_questions < held->n_questions ? c->n_questions : held->n_questions;
    for (uint32_t q = 0; q < c->n_recorded && status == KVB_OK; q++) status = match_question(c, r, at, q, err);
    return status;
}

// ---- How the record grows ----

static uint32_t given_among(const profile_context *c, uint32_t first, uint32_t end)
{
    uint32_t n = 0;
    for (uint32_t q = first; q < end; q++) n += c->questions[q].answer != NULL;
    return n;
}

// Do the files hold everything that the record has? Then they alone say what it is made of.
static bool covers(const profile_job *job, const record *r)
{
    size_t covered = 0;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        const record_context_info *held = record_context(r, find_recorded(r, c->id));
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

// The larger record's contexts, in order: that of the files where they have all, else new ones behind the record's.
static kvb_status list_ids(profile_job *job, const record *r, kvb_error *err)
{
    profile_growth *g = &job->growth;
    size_t n = record_context_count(r), n_own = 0;
    g->ids = calloc(n + job->n_contexts + 1, sizeof *g->ids);
    g->own = calloc(job->n_contexts + 1, sizeof *g->own);
    if (!g->ids || !g->own) return kvb_fail(err, KVB_MEMORY, "no memory for %zu context ids", n + job->n_contexts);
    if (g->relation != RECORD_ALL_TEXTS)
        for (size_t i = 0; i < n; i++) g->ids[g->n_ids++] = record_context(r, i)->id;
    for (size_t i = 0; i < job->n_contexts; i++) {
        const profile_context *c = &job->contexts[i];
        if (c->recorded && g->relation == RECORD_ALL_TEXTS)
            g->ids[g->n_ids++] = record_context(r, find_recorded(r, c->id))->id;
        if (c->recorded) continue;
        memcpy(g->own[n_own], c->id, sizeof *g->own);
        g->ids[g->n_ids++] = g->own[n_own++];
    }
    return KVB_OK;
}

// What it costs to compute a metric once more: sums over all attention weights and norms of outputs are dear. 0: it
// looks at nothing, and so proves nothing.
static unsigned witness_cost(const metric *m)
{
    unsigned needs = metric_needs(m), cost = 0;
    for (unsigned item = 1; item <= VIEW_OUTPUT_NORMS; item *= 2)
        if (needs & item) cost += item & (VIEW_COLUMN_SUMS | VIEW_OUTPUT_NORMS) ? 8 : 1;
    return cost;
}

// Which of the options' metrics the record has, and the cheapest of them that proves something.
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

// ---- What is left to do ----

static bool all_recorded(const profile_job *job, size_t n_metrics)
{
    uint64_t all = n_metrics < 64 ? (UINT64_C(1) << n_metrics) - 1 : UINT64_MAX;
    return (job->growth.recorded & all) == all;
}

// A context as the record has it: its tokens, and no question.
static kvb_status take_recorded(profile_context *out, record *r, size_t at, const profile_options *o, kvb_error *err)
{
    const record_context_info *held = record_context(r, at);
    *out = (profile_context){.n_tokens = held->n_tokens, .recorded = true};
    snprintf(out->id, sizeof out->id, "%s", held->id);
    out->ids = malloc(held->n_tokens * sizeof *out->ids);
    if (!out->ids) return kvb_fail(err, KVB_MEMORY, "no memory for %u tokens", held->n_tokens);
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

// The record's contexts that are in none of the files, where a metric is added to all.
static kvb_status add_recorded(profile_job *job, const profile_options *o, kvb_error *err)
{
    size_t n = record_context_count(o->grows), given = job->n_contexts;
    profile_context *larger = reallocarray(job->contexts, given + n + 1, sizeof *larger);
    if (!larger) return kvb_fail(err, KVB_MEMORY, "no memory for %zu contexts", given + n);
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
        if (c->recorded && metrics_done && c->n_questions == c->n_recorded) profile_context_free(c);
        else job->contexts[kept++] = *c;
    }
    job->n_contexts = kept;
}

// The shortest text of the record, when the run would otherwise prefill new ones alone.
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

kvb_status profile_grow_job(profile_job *job, const profile_options *o, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < job->n_contexts && status == KVB_OK; i++)
        status = match_context(&job->contexts[i], o->grows, err);
    if (status == KVB_OK) status = relate(job, o->grows, err);
    if (status == KVB_OK) status = list_ids(job, o->grows, err);
    if (status == KVB_OK) status = sort_metrics(job, o, err);
    if (status != KVB_OK) return status;
    bool metrics_done = all_recorded(job, o->n_metrics);
    if (!metrics_done) status = add_recorded(job, o, err);
    if (status == KVB_OK) drop_finished(job, metrics_done);
    return status == KVB_OK ? choose_check(job, o, err) : status;
}

// ---- The larger record's attributes ----

kvb_status profile_grown_attributes(cJSON **out, const model *m, const profile_job *job, const profile_options *o,
                                    kvb_error *err)
{
    static const char *const of_texts[] = {"calibration_sha256", "calibration_files", "given_answers", "max_questions"};
    const cJSON *held = record_attributes(o->grows);
    cJSON *own = profile_attributes(m, job, o);
    *out = NULL;
    bool ok = own != NULL;
    for (size_t i = 0; ok && job->growth.relation == RECORD_SAME_TEXTS && i < sizeof of_texts / sizeof *of_texts; i++) {
        const cJSON *value = cJSON_GetObjectItemCaseSensitive(held, of_texts[i]);
        cJSON_DeleteItemFromObjectCaseSensitive(own, of_texts[i]);
        cJSON *copy = value ? cJSON_Duplicate(value, true) : NULL;
        ok = !value || (copy && cJSON_AddItemToObject(own, of_texts[i], copy));
    }
    kvb_status status =
        ok ? record_join_attributes(out, record_path(o->grows), held, "this command", own, job->growth.relation, err)
           : kvb_fail(err, KVB_MEMORY, "no memory for the attributes");
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
    size_t at = find_recorded(o->grows, c->id);
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
