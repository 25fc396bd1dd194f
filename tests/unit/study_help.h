// What the tests of study/ share: small records whose importances are written by hand.
#pragma once
#include "formats_help.h"
#include "study/options.h"
#include "study/selection.h"
#include "study/table.h"

// One layer of two KV heads; the metric ranks early tokens first; the first and the last token are protected.
enum { CASE_HEADS = 2, CASE_TOKENS_MAX = 64, CASE_CONTEXTS_MAX = 4, CASE_QUESTIONS_MAX = 4 };

typedef struct case_question {
    uint32_t n_queries;     // 0: skipped
    float head[CASE_HEADS]; // importance of every token of the head, or:
    const float *first;     // [n_tokens] those of head 0
} case_question;

typedef struct case_context {
    const char *id;
    uint32_t n_tokens;
    case_question questions[CASE_QUESTIONS_MAX]; // up to the first one that is all zero
    uint32_t n_questions;
} case_context;

#define CASE_MODEL(begin) begin "000000000000000000000000000000000000000000000000000000000000" // SHA-256 of weights

static inline cJSON *case_attributes(const char *metrics)
{
    cJSON *a = cJSON_CreateObject();
    cJSON_AddStringToObject(a, "model_sha256", CASE_MODEL("AB12"));
    cJSON_AddStringToObject(a, "model_id", "by hand");
    if (metrics) cJSON_AddStringToObject(a, "metrics", metrics);
    return a;
}

static inline void case_put_question(record_writer *w, const case_context *c, uint32_t q)
{
    float oracle[CASE_HEADS * CASE_TOKENS_MAX];
    const case_question *one = &c->questions[q];
    for (uint32_t i = 0; i < CASE_HEADS * c->n_tokens; i++) oracle[i] = one->head[i / c->n_tokens];
    for (uint32_t i = 0; i < c->n_tokens && one->first; i++) oracle[i] = one->first[i];
    const int32_t ids[1] = {1};
    record_question put = {one->n_queries ? oracle : NULL, ids, 1, ids, one->n_queries ? 1 : 0, one->n_queries, NULL};
    help_ok(record_put_question(w, c->id, q, &put, err));
}

static inline void case_put_context(record_writer *w, const case_context *c, const char *const *metrics, size_t n)
{
    float scores[CASE_HEADS * CASE_TOKENS_MAX];
    const float *all[8];
    int32_t ids[CASE_TOKENS_MAX];
    for (uint32_t t = 0; t < c->n_tokens; t++) ids[t] = (int32_t)t;
    for (uint32_t i = 0; i < CASE_HEADS * c->n_tokens; i++) scores[i] = -(float)(i % c->n_tokens);
    for (size_t m = 0; m < n; m++) all[m] = scores;
    help_ok(record_put_context(w, c->id, ids, c->n_tokens, metrics, all, n, err));
    for (uint32_t q = 0; q < c->n_questions; q++) case_put_question(w, c, q);
}

// Writes a record of n contexts. Takes ownership of the attributes.
static inline void case_write(const char *path, cJSON *attributes, const case_context *contexts, size_t n,
                              const char *const *metrics, size_t n_metrics)
{
    record_writer *w;
    const record_shape shape = {1, 4, CASE_HEADS, 8};
    const char *ids[CASE_CONTEXTS_MAX];
    help_ok(record_begin(&w, path, &shape, attributes, RECORD_NEW, err));
    for (size_t k = 0; k < n; k++) {
        case_put_context(w, &contexts[k], metrics, n_metrics);
        ids[k] = contexts[k].id;
    }
    help_ok(record_finish(w, ids, n, err));
    record_writer_free(w);
    cJSON_Delete(attributes);
}

static const char *const CASE_METRIC[] = {"keydiff"};
#define CASE_PROTECTED "{\"keydiff\": {\"protect_sink\": 1, \"protect_window\": 1}}"

// Writes a record of the contexts for keydiff, with one sink and one last token protected. Returns its path.
static inline const char *case_record(const char *name, const case_context *contexts, size_t n)
{
    static char paths[CASE_CONTEXTS_MAX][256]; // help_path() reuses its own
    static int next;
    char *path = strcpy(paths[next++ % CASE_CONTEXTS_MAX], help_path("%s", name));
    case_write(path, case_attributes(CASE_PROTECTED), contexts, n, CASE_METRIC, 1);
    return path;
}

// Opens a whole record for keydiff.
static inline void case_select(selection *s, const char *path)
{
    const selection_request all = {CASE_METRIC, 1, NULL, UINT64_MAX, NULL};
    help_ok(selection_open(s, path, &all, err));
}

static inline study_options case_options(const char *aggregate)
{
    study_options o = study_options_make();
    help_ok(study_options_aggregate(&o, aggregate, err));
    return o;
}

// Writes a solved table with its metadata.
static inline void case_save(const study_table *t, const char *to)
{
    cJSON *about;
    help_ok(study_table_describe(t, &about, err));
    help_ok(study_table_write(t, about, to, err));
    cJSON_Delete(about);
}

// What a test has selected, if anything; case_teardown() closes it.
static selection from;

static inline void case_teardown(void)
{
    selection_close(&from);
    help_teardown();
}

// Solves the table of the selection for keydiff and writes it.
static inline void case_solve_to(const selection *of, const char *to)
{
    study_table t;
    study_options o = case_options("mean_loss");
    help_ok(study_table_open(&t, of, "keydiff", &o, false, err));
    help_ok(study_table_solve(&t, NULL, err));
    case_save(&t, to);
    study_table_free(&t);
}

#define ck_near(a, b) ck_assert_double_eq_tol(a, b, 1e-12)
