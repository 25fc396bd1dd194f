// A small record with known numbers, written step by step.
#pragma once
#include "formats_help.h"

enum { SMALL_L = 2, SMALL_G = 3, SMALL_CONTEXTS = 3, SMALL_QUESTIONS = 3, SMALL_MAX = SMALL_L * SMALL_G * 64 };

static const record_shape small_shape = {SMALL_L, 9, SMALL_G, 64};
static const char *const small_ids[SMALL_CONTEXTS] = {"zeta", "alpha-2", "mid.dle_3"};
static const char *const small_metrics[2] = {"snapkv:lukv", "keydiff"};

static inline uint32_t small_tokens(size_t context)
{
    return 7 + 5 * (uint32_t)context;
}

static inline float small_score(size_t context, size_t metric, size_t i)
{
    return (float)(int)((i * 37 + context * 11 + metric * 5) % 101) - 50.0F;
}

static inline float small_oracle(size_t context, size_t question, size_t i)
{
    return (float)((i * 13 + context * 7 + question * 3) % 17) / 1024.0F;
}

static inline cJSON *small_attributes(void)
{
    cJSON *a = cJSON_CreateObject();
    cJSON_AddStringToObject(a, "model_id", "tiny \xc3\xa9 model");
    cJSON_AddStringToObject(a, "empty", "");
    cJSON_AddNumberToObject(a, "seed", 1234567890123.0);
    cJSON_AddNumberToObject(a, "temperature", 0.7);
    cJSON_AddNumberToObject(a, "minus_zero", -0.0);
    cJSON_AddBoolToObject(a, "greedy", 0);
    cJSON_AddBoolToObject(a, "ignore_eos", 1);
    cJSON_AddStringToObject(a, "z1", "more attributes than are kept in an object header");
    cJSON_AddStringToObject(a, "z2", "of HDF5");
    return a;
}

static inline kvb_status small_begin(record_writer **w, const char *path, bool resume, kvb_error *err)
{
    cJSON *a = small_attributes();
    kvb_status status = record_begin(w, path, &small_shape, a, resume ? RECORD_RESUME : RECORD_NEW, err);
    cJSON_Delete(a);
    return status;
}

static inline kvb_status small_put_context(record_writer *w, size_t c, kvb_error *err)
{
    uint32_t n = small_tokens(c);
    size_t count = (size_t)SMALL_L * SMALL_G * n;
    float scores[2][SMALL_MAX];
    int32_t ids[64];
    for (uint32_t t = 0; t < n; t++) ids[t] = (int32_t)(100 * c + t);
    for (size_t m = 0; m < 2; m++)
        for (size_t i = 0; i < count; i++) scores[m][i] = small_score(c, m, i);
    const float *pointers[2] = {scores[0], scores[1]};
    return record_put_context(w, small_ids[c], ids, n, small_metrics, pointers, 2, err);
}

// Returns the number of question q, 0, 1 or 12, which leaves a gap. Question 1 of each context was skipped.
static inline uint32_t small_number(size_t q)
{
    return q == 2 ? 12 : (uint32_t)q;
}

static inline kvb_status small_put_question(record_writer *w, size_t c, size_t q, kvb_error *err)
{
    size_t count = (size_t)SMALL_L * SMALL_G * small_tokens(c);
    float oracle[SMALL_MAX];
    const int32_t suffix[4] = {1, 2, 3, (int32_t)c}, answer[2] = {7, (int32_t)q};
    for (size_t i = 0; i < count; i++) oracle[i] = small_oracle(c, q, i);
    record_question one = {oracle, suffix, 4, answer, 2, 63, NULL};
    if (q == 1) one = (record_question){NULL, suffix, 4, NULL, 0, 0, NULL};
    return record_put_question(w, small_ids[c], small_number(q), &one, err);
}

// Writes whatever is missing, in calibration order.
static inline kvb_status small_put_missing(record_writer *w, kvb_error *err)
{
    for (size_t c = 0; c < SMALL_CONTEXTS; c++) {
        kvb_status status = KVB_OK;
        if (!record_writer_has_context(w, small_ids[c])) status = small_put_context(w, c, err);
        for (size_t q = 0; q < SMALL_QUESTIONS && status == KVB_OK; q++)
            if (!record_writer_has_question(w, small_ids[c], small_number(q)))
                status = small_put_question(w, c, q, err);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}

static inline kvb_status small_write(const char *path, bool resume, kvb_error *err)
{
    record_writer *w;
    kvb_status status = small_begin(&w, path, resume, err);
    if (status == KVB_OK) status = small_put_missing(w, err);
    if (status == KVB_OK) status = record_finish(w, small_ids, SMALL_CONTEXTS, err);
    record_writer_free(w);
    return status;
}

// Reads every number of a record that small_write wrote. Returns the first error, if any.
static inline kvb_status small_read_all(record *r, kvb_error *err)
{
    for (size_t c = 0; c < record_context_count(r); c++) {
        const record_context_info *info = record_context(r, c);
        size_t count = (size_t)record_get_shape(r).n_layers * record_get_shape(r).n_kv_heads * info->n_tokens;
        float *array = malloc(count * sizeof *array);
        int32_t *ids = malloc((info->n_tokens + 64) * sizeof *ids);
        kvb_status status = record_read_tokens(r, c, ids, err);
        for (uint32_t m = 0; m < info->n_metrics && status == KVB_OK; m++)
            status = record_read_scores(r, c, info->metrics[m], array, err);
        for (uint32_t q = 0; q < info->n_questions && status == KVB_OK; q++) {
            if (info->questions[q].n_queries > 0) status = record_read_oracle(r, c, q, array, err);
            if (status == KVB_OK && info->questions[q].n_suffix <= 64) status = record_read_suffix(r, c, q, ids, err);
            if (status == KVB_OK && info->questions[q].n_answer <= 64) status = record_read_answer(r, c, q, ids, err);
        }
        free(ids);
        free(array);
        if (status != KVB_OK) return status;
    }
    return KVB_OK;
}
