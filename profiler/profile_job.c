// The profiling run, first half: calibration texts become token ids, counted and checked before the model runs.
#include "formats/record_growth.h"
#include "formats/sha256.h"
#include "profiler/metric/query_statistics.h"
#include "profiler/profile_growth.h"
#include "profiler/profile_losses.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct id_list {
    int32_t *ids;
    size_t n;
} id_list;

// Takes `ids`, which may be NULL after a failure.
static kvb_status append_made(id_list *out, int32_t *ids, size_t n, kvb_error *err)
{
    int32_t *joined = ids ? realloc(out->ids, (out->n + n + 1) * sizeof *joined) : NULL;
    if (!joined) {
        free(ids);
        return kvb_fail(err, KVB_MEMORY, "no memory for %zu tokens", out->n + n);
    }
    memcpy(joined + out->n, ids, n * sizeof *ids);
    free(ids);
    out->ids = joined;
    out->n += n;
    return KVB_OK;
}

static kvb_status append_text(id_list *out, const model_text *t, text_part part, const char *text, kvb_error *err)
{
    int32_t *ids = NULL;
    size_t n = 0;
    kvb_status status = model_text_encode(t, part, text, strlen(text), &ids, &n, err);
    return status == KVB_OK ? append_made(out, ids, n, err) : status;
}

static kvb_status append_ids(id_list *out, const model_text *t, const int32_t *ids, size_t n, kvb_error *err)
{
    int32_t *joined = realloc(out->ids, (out->n + n + 1) * sizeof *joined);
    if (!joined) return kvb_fail(err, KVB_MEMORY, "no memory for %zu tokens", out->n + n);
    out->ids = joined;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || (uint32_t)ids[i] >= t->vocabulary)
            return kvb_fail(err, KVB_ARGUMENT,
                            "id %d at place %zu, expected 0 to %u; were the ids made with another model's tokenizer?",
                            ids[i], i, t->vocabulary - 1);
        joined[out->n++] = ids[i];
    }
    return KVB_OK;
}

// The context's ids, BOS first where the rule says so. Ids given by the user are taken as they are.
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

// Question and answer prefix are encoded as one text. A chat template says itself where the answer begins, so the
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
    return status == KVB_OK ? append_made(out, ids, n, err) : status;
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
    if (status == KVB_OK && answer.ids && answer.n + o->include_first < 2)
        status = kvb_fail(err, KVB_ARGUMENT,
                          "the answer has %zu tokens, expected at least 2 (the last one is never a query); leave it "
                          "out to sample one",
                          answer.n);
    if (status == KVB_OK && (suffix.n > INT32_MAX / 2 || answer.n > INT32_MAX / 2))
        status = kvb_fail(err, KVB_ARGUMENT, "question and answer have %zu tokens, too many", suffix.n + answer.n);
    if (status != KVB_OK) {
        free(suffix.ids);
        free(answer.ids);
        return status;
    }
    *out = (profile_question){suffix.ids, (uint32_t)suffix.n, answer.ids, (uint32_t)answer.n, 0};
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
    if (status == KVB_OK) status = sha256_hex(c->sample_id, strlen(c->sample_id), hash, err);
    if (status != KVB_OK) return status;
    snprintf(out->id, sizeof out->id, "%s", c->sample_id);
    hash[16] = 0;
    out->key = strtoull(hash, NULL, 16);
    out->n_tokens = (uint32_t)ids.n;
    size_t n = o->max_questions && c->n_questions > o->max_questions ? o->max_questions : c->n_questions;
    out->questions = calloc(n, sizeof *out->questions);
    if (!out->questions) return kvb_fail(err, KVB_MEMORY, "no memory for %zu questions", n);
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

static bool id_is_taken(const profile_job *job, const char *id)
{
    for (size_t i = 0; i < job->n_contexts; i++)
        if (strcmp(job->contexts[i].id, id) == 0) return true;
    return false;
}

// The hashes of all files, in order, commas between.
static kvb_status list_files(char **out, const calib_file *files, size_t n, kvb_error *err)
{
    enum { DIGITS = 64 };
    char *list = malloc(n * (DIGITS + 1) + 1);
    if (!list) return kvb_fail(err, KVB_MEMORY, "no memory for the hashes of %zu files", n);
    list[0] = '\0';
    for (size_t i = 0; i < n; i++)
        snprintf(list + (i ? i * (DIGITS + 1) - 1 : 0), DIGITS + 2, "%s%s", i ? "," : "", files[i].sha256);
    *out = list;
    return KVB_OK;
}

static void count_job(profile_job *job, const model *m, const profile_options *o)
{
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
    profile_losses_count(job, o);
}

kvb_status profile_prepare(profile_job *out, const model *m, const model_text *text, const calib_file *files,
                           size_t n_files, const profile_options *o, kvb_error *err)
{
    *out = (profile_job){.text = text};
    size_t n = 0;
    if (model_budgeted(&m->config, m->config.n_layers) == 0)
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "%s: every layer has a window of %u positions, so no cache grows beyond it and there is nothing "
            "to budget",
            m->config.name, m->config.window);
    if (o->n_metrics > PROFILE_MAX_METRICS)
        return kvb_fail(err, KVB_ARGUMENT, "%zu metrics in one pass, at most %d; profile the others in a second one",
                        o->n_metrics, PROFILE_MAX_METRICS);
    for (size_t i = 0; i < n_files; i++) n += files[i].count;
    out->contexts = calloc(n ? n : 1, sizeof *out->contexts);
    kvb_status status = out->contexts ? list_files(&out->calibration_files, files, n_files, err)
                                      : kvb_fail(err, KVB_MEMORY, "no memory for %zu contexts", n);
    // Another model says so, before its other tokens do; a plan does not read the file to its end to know it.
    if (status == KVB_OK && o->grows && m->sha256[0]) {
        cJSON *ignored;
        status = profile_grown_attributes(&ignored, m, out, o, err);
        cJSON_Delete(ignored);
    }
    for (size_t i = 0; status == KVB_OK && i < n_files; i++)
        for (size_t k = 0; status == KVB_OK && k < files[i].count; k++) {
            const calib_context *c = &files[i].contexts[k];
            if (id_is_taken(out, c->sample_id)) {
                status =
                    kvb_fail(err, KVB_ARGUMENT, "line %zu: sample_id %s stands in two files; give each context its own",
                             c->line, c->sample_id);
                break;
            }
            status = prepare_context(&out->contexts[out->n_contexts++], m, text, c, o, err);
            if (status != KVB_OK) {
                kvb_error inner = err ? *err : (kvb_error){0};
                status = kvb_fail(err, status, "line %zu, sample %s: %s", c->line, c->sample_id, inner.message);
            }
        }
    for (size_t i = 0; status == KVB_OK && i < out->n_contexts; i++) out->n_given += out->contexts[i].n_given;
    if (status == KVB_OK && o->grows) status = profile_grow_job(out, o, err);
    if (status == KVB_OK) {
        count_job(out, m, o);
        status = profile_fit_batch(out, m, o, err);
    }
    if (status != KVB_OK) profile_job_free(out);
    return status;
}

void profile_context_free(profile_context *c)
{
    for (uint32_t q = 0; c->questions && q < c->n_questions; q++) {
        free(c->questions[q].suffix);
        free(c->questions[q].answer);
    }
    free(c->questions);
    free(c->ids);
}

void profile_job_free(profile_job *job)
{
    for (size_t i = 0; job->contexts && i < job->n_contexts; i++) profile_context_free(&job->contexts[i]);
    free(job->contexts);
    free(job->calibration_files);
    free(job->growth.ids);
    free(job->growth.own);
    free(job->growth.check.ids);
    memset(job, 0, sizeof *job);
}

static bool add_metrics(cJSON *to, const profile_options *o)
{
    cJSON *all = cJSON_CreateObject();
    bool ok = all != NULL;
    for (size_t i = 0; ok && i < o->n_metrics; i++) {
        cJSON *parameters = metric_to_json(&o->metrics[i]);
        ok = parameters && cJSON_AddItemToObject(all, o->metrics[i].spec, parameters);
    }
    char *text = ok ? cJSON_PrintUnformatted(all) : NULL;
    ok = text && cJSON_AddStringToObject(to, "metrics", text);
    cJSON_free(text);
    cJSON_Delete(all);
    return ok;
}

// The layers that the record leaves out, commas between; "" where there is none.
static void list_bounded(char *text, size_t size, const model_config *c)
{
    size_t used = 0;
    text[0] = '\0';
    for (uint32_t l = 0; l < c->n_layers; l++)
        if (model_layer_bounded(c, l)) used += (size_t)snprintf(text + used, size - used, "%s%u", used ? "," : "", l);
}

// What is not in the record's own shape: numbers of the config that tell models of one family apart.
static bool add_shape(cJSON *to, const model_config *c)
{
    cJSON *shape = cJSON_CreateObject();
    bool ok = shape && cJSON_AddNumberToObject(shape, "width", c->width) &&
              cJSON_AddNumberToObject(shape, "ffn_width", c->ffn_width) &&
              cJSON_AddNumberToObject(shape, "vocabulary", c->vocabulary) &&
              cJSON_AddNumberToObject(shape, "context_length", c->context_length);
    if (c->n_experts) ok = ok && cJSON_AddNumberToObject(shape, "experts", c->n_experts);
    char *text = ok ? cJSON_PrintUnformatted(shape) : NULL;
    ok = text && cJSON_AddStringToObject(to, "model_shape", text);
    cJSON_free(text);
    cJSON_Delete(shape);
    return ok;
}

// The kind, and a hash of what it comes to, since templates of a kind differ.
static bool add_chat(cJSON *to, const chat_frame *f)
{
    char hash[65];
    sha256_state *state = NULL;
    bool ok =
        sha256_begin(&state, NULL) == KVB_OK && sha256_add(state, f->front, strlen(f->front) + 1, NULL) == KVB_OK &&
        sha256_add(state, f->back, strlen(f->back) + 1, NULL) == KVB_OK && sha256_end(state, hash, NULL) == KVB_OK;
    sha256_free(state);
    return ok && cJSON_AddStringToObject(to, "chat", f->kind) && cJSON_AddStringToObject(to, "chat_sha256", hash);
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
    bool ok = a && cJSON_AddStringToObject(a, "tool_version", KVBUDGET_VERSION) &&
              cJSON_AddStringToObject(a, "architecture", m->config.architecture) &&
              cJSON_AddStringToObject(a, "model_id", m->config.name) &&
              cJSON_AddStringToObject(a, "model_sha256", m->sha256) &&
              cJSON_AddStringToObject(a, "tokenizer_sha256", t->tokens ? tokenizer_sha256(t->tokens) : "") &&
              record_set_calibration(a, job->calibration_files, NULL) == KVB_OK &&
              cJSON_AddStringToObject(a, "backend", m->device->b->name) &&
              cJSON_AddStringToObject(a, "compute", m->device->b->compute) &&
              cJSON_AddStringToObject(a, "oracle", oracle_texts[o->oracle]) &&
              cJSON_AddNumberToObject(a, "width", m->config.width) &&
              cJSON_AddNumberToObject(a, "new_tokens", o->new_tokens) &&
              cJSON_AddNumberToObject(a, "given_answers", (double)job->n_given) &&
              cJSON_AddStringToObject(a, "sampling", o->draw.greedy ? "greedy" : "temperature") &&
              cJSON_AddNumberToObject(a, "temperature", o->draw.greedy ? 0 : o->draw.temperature) &&
              cJSON_AddStringToObject(a, "seed", seed) && cJSON_AddBoolToObject(a, "ignore_eos", o->ignore_eos) &&
              cJSON_AddBoolToObject(a, "ignore_answers", o->ignore_answers) &&
              cJSON_AddBoolToObject(a, "include_first", o->include_first) &&
              cJSON_AddStringToObject(a, "bos", bos_names[o->bos]) &&
              cJSON_AddNumberToObject(a, "max_tokens", o->max_tokens) &&
              cJSON_AddNumberToObject(a, "max_questions", o->max_questions) && add_metrics(a, o) &&
              add_shape(a, &m->config) && origin_describe(weights_origin_of(m->source), a);
    if (bounded[0]) ok = ok && cJSON_AddStringToObject(a, "bounded_layers", bounded);
    if (bounded[0]) ok = ok && cJSON_AddNumberToObject(a, "layer_window", m->config.window);
    if (t->chat.kind) ok = ok && add_chat(a, &t->chat);
    if (t->parse_special) ok = ok && cJSON_AddStringToObject(a, "special", "yes");
    if (m->form == WEIGHTS_HALF) ok = ok && cJSON_AddStringToObject(a, "weights", "bf16");
    if (o->statistics) ok = ok && cJSON_AddStringToObject(a, "query_statistics_sha256", o->statistics->sha256);
    if (!ok) {
        cJSON_Delete(a);
        return NULL;
    }
    return a;
}
