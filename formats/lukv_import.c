// Reading the lukv-steps directory: after the names of all files (lukv_scan.c), one context after the other.
#include "file_read.h"
#include "lukv_layout.h"
#include "lukv_scan.h"
#include "names.h"
#include "npy.h"
#include "runtime/fail.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What the published protocol records at most: 64 new tokens, the first of which comes out of the prefill
// (methods.md 2.2).
enum { PUBLISHED_QUERIES = 63 };

// ---- Arrays ----

// A file of the directory, mapped; `values` points into it where that is possible, else to a converted copy.
typedef struct step_array {
    file_view view;
    npy_array npy;
    const void *values;
    void *copy;
} step_array;

static void release_array(step_array *a)
{
    free(a->copy);
    file_unmap(&a->view);
}

static kvb_status load_npy(step_array *a, const char *path, npy_type type, kvb_error *err)
{
    memset(a, 0, sizeof *a);
    kvb_status status = file_map(&a->view, path, err);
    if (status == KVB_OK) status = npy_parse(&a->npy, a->view.data, a->view.size, path, err);
    if (status != KVB_OK) return status;
    a->values = a->npy.data;
    if (a->npy.type == type && (uintptr_t)a->npy.data % npy_type_size(type) == 0) return KVB_OK;
    a->copy = malloc(a->npy.count * npy_type_size(type) + 1); // count elements lie in the file: no overflow
    if (!a->copy) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
    a->values = a->copy;
    return type == NPY_F32 ? npy_to_f32(&a->npy, a->copy, path, err) : npy_to_i32(&a->npy, a->copy, path, err);
}

// What was read is what the file holds: asked after the last use of an array, with the name that it has in its context.
static kvb_status check_array(const importer *in, const step_array *a, const step_context *c, const char *file,
                              kvb_error *err)
{
    char *path = lukv_path(in->dir, c->id, "%s", file);
    kvb_status status = path ? file_check(&a->view, path, err) : lukv_no_memory(in, err);
    free(path);
    return status;
}

static kvb_status check_numbered(const importer *in, const step_array *a, const step_context *c, const char *what,
                                 uint32_t number, kvb_error *err)
{
    char file[64];
    snprintf(file, sizeof file, "%s_%u.npy", what, number);
    return check_array(in, a, c, file, err);
}

// A float array [L,G,T]. The first of all fixes L and G, the first of a context T (given as 0).
static kvb_status load_array(importer *in, step_array *a, const char *path, uint32_t *n_tokens, kvb_error *err)
{
    kvb_status status = load_npy(a, path, NPY_F32, err);
    if (status != KVB_OK) return status;
    const uint64_t *s = a->npy.shape;
    if (a->npy.n_dims != 3 || s[0] == 0 || s[1] == 0 || s[2] == 0 || s[0] > UINT32_MAX || s[1] > UINT32_MAX ||
        s[2] > UINT32_MAX)
        return kvb_fail(err, KVB_FORMAT, "%s: expected an array [layers, KV heads, tokens]", path);
    if (in->shape.n_layers == 0) {
        in->shape.n_layers = (uint32_t)s[0];
        in->shape.n_kv_heads = (uint32_t)s[1];
    }
    if (*n_tokens == 0) *n_tokens = (uint32_t)s[2];
    if (s[0] != in->shape.n_layers || s[1] != in->shape.n_kv_heads || s[2] != *n_tokens)
        return kvb_fail(err, KVB_MISMATCH, "%s: expected shape [%u,%u,%u] as before, found [%llu,%llu,%llu]", path,
                        in->shape.n_layers, in->shape.n_kv_heads, *n_tokens, (unsigned long long)s[0],
                        (unsigned long long)s[1], (unsigned long long)s[2]);
    return KVB_OK;
}

static kvb_status load_ids(step_array *a, const char *path, kvb_error *err)
{
    kvb_status status = load_npy(a, path, NPY_I32, err);
    if (status == KVB_OK && (a->npy.n_dims != 1 || a->npy.count > UINT32_MAX))
        status = kvb_fail(err, KVB_FORMAT, "%s: expected one dimension of token ids", path);
    return status;
}

// ---- One context ----

// The arrays of a context's metrics, mapped; names and pointers as record_put_context takes them. Each [c->n_metrics].
typedef struct step_scores {
    step_array *arrays;
    const float **scores;
    char (*names)[METRIC_NAME_MAX + 1];
    const char **name_list;
} step_scores;

static void release_scores(step_scores *s, size_t n)
{
    for (size_t m = 0; m < n && s->arrays; m++) release_array(&s->arrays[m]);
    free(s->name_list);
    free(s->names);
    free(s->scores);
    free(s->arrays);
}

static kvb_status load_scores(step_scores *s, importer *in, const step_context *c, uint32_t *n_tokens, kvb_error *err)
{
    size_t n = c->n_metrics;
    *s = (step_scores){calloc(n + 1, sizeof *s->arrays), calloc(n + 1, sizeof *s->scores),
                       calloc(n + 1, sizeof *s->names), calloc(n + 1, sizeof *s->name_list)};
    if (!s->arrays || !s->scores || !s->names || !s->name_list) return lukv_no_memory(in, err);
    kvb_status status = KVB_OK;
    const cJSON *known = cJSON_GetObjectItemCaseSensitive(c->side, "metrics");
    for (size_t m = 0; m < n && status == KVB_OK; m++) {
        const cJSON *name = cJSON_GetObjectItemCaseSensitive(known, c->metric_files[m]);
        if (cJSON_IsString(name)) snprintf(s->names[m], sizeof s->names[m], "%s", name->valuestring);
        else lukv_metric_name(s->names[m], sizeof s->names[m], c->metric_files[m]);
        s->name_list[m] = s->names[m];
        char *path = lukv_path(in->dir, c->id, "%s", c->metric_files[m]);
        status = path ? load_array(in, &s->arrays[m], path, n_tokens, err) : lukv_no_memory(in, err);
        s->scores[m] = s->arrays[m].values;
        free(path);
    }
    return status;
}

// What a stopped import has put must be what the folder holds now: nobody says that it was left alone meanwhile.
static kvb_status put_scores(importer *in, record_writer *w, const step_context *c, const int32_t *ids, uint32_t n_ids,
                             uint32_t *n_tokens, kvb_error *err)
{
    step_scores s;
    int32_t *unknown = NULL;
    kvb_status status = load_scores(&s, in, c, n_tokens, err);
    if (status == KVB_OK && ids && n_ids != *n_tokens)
        status = kvb_fail(err, KVB_MISMATCH, "%s/context_%s/context_ids.npy: %u ids for arrays of %u tokens", in->dir,
                          c->id, n_ids, *n_tokens);
    if (status == KVB_OK && !ids) {
        unknown = malloc((size_t)*n_tokens * sizeof *unknown + 1);
        if (!unknown) status = lukv_no_memory(in, err);
        for (uint32_t t = 0; t < *n_tokens && unknown; t++) unknown[t] = -1;
        ids = unknown;
    }
    if (status == KVB_OK)
        status = record_writer_has_context(w, c->id)
                     ? record_same_context(w, c->id, ids, *n_tokens, s.name_list, s.scores, c->n_metrics, err)
                     : record_put_context(w, c->id, ids, *n_tokens, s.name_list, s.scores, c->n_metrics, err);
    for (size_t m = 0; m < c->n_metrics && status == KVB_OK; m++)
        status = check_array(in, &s.arrays[m], c, c->metric_files[m], err);
    release_scores(&s, c->n_metrics);
    free(unknown);
    return status;
}

// The side file knows; else the answer tells, whose first token comes out of the prefill; else the options.
static uint32_t count_queries(const importer *in, const step_context *c, const step_question *q, uint32_t n_answer)
{
    const cJSON *entry =
        lukv_side_entry(cJSON_GetObjectItemCaseSensitive(c->side, "questions"), "number", NULL, (double)q->number);
    const cJSON *n = cJSON_GetObjectItemCaseSensitive(entry, "n_queries");
    if (cJSON_IsNumber(n) && n->valuedouble >= 0 && n->valuedouble <= UINT32_MAX) return (uint32_t)n->valuedouble;
    if (!q->has_oracle) return 0;
    if (q->has_answer) return n_answer > 1 ? n_answer - 1 : 1;
    return in->options->n_queries ? in->options->n_queries : PUBLISHED_QUERIES;
}

static kvb_status load_numbered(const importer *in, step_array *a, const step_context *c, const char *what,
                                uint32_t number, kvb_error *err)
{
    char *path = lukv_path(in->dir, c->id, "%s_%u.npy", what, number);
    kvb_status status = path ? load_ids(a, path, err) : lukv_no_memory(in, err);
    free(path);
    return status;
}

static kvb_status put_question(importer *in, record_writer *w, const step_context *c, const step_question *q,
                               uint32_t *n_tokens, kvb_error *err)
{
    step_array oracle = {0}, suffix = {0}, answer = {0};
    kvb_status status = KVB_OK;
    if (q->has_suffix) status = load_numbered(in, &suffix, c, "suffix_ids", q->number, err);
    if (status == KVB_OK && q->has_answer) status = load_numbered(in, &answer, c, "answer_ids", q->number, err);
    if (status == KVB_OK && q->has_oracle) {
        char *path = lukv_path(in->dir, c->id, "question_%u.npy", q->number);
        status = path ? load_array(in, &oracle, path, n_tokens, err) : lukv_no_memory(in, err);
        free(path);
    }
    if (status == KVB_OK) {
        record_question one = {oracle.values,
                               suffix.values,
                               (uint32_t)suffix.npy.count,
                               answer.values,
                               (uint32_t)answer.npy.count,
                               count_queries(in, c, q, (uint32_t)answer.npy.count)};
        status = record_writer_has_question(w, c->id, q->number) ? record_same_question(w, c->id, q->number, &one, err)
                                                                 : record_put_question(w, c->id, q->number, &one, err);
    }
    if (status == KVB_OK) status = check_numbered(in, &oracle, c, "question", q->number, err);
    if (status == KVB_OK) status = check_numbered(in, &suffix, c, "suffix_ids", q->number, err);
    if (status == KVB_OK) status = check_numbered(in, &answer, c, "answer_ids", q->number, err);
    release_array(&oracle);
    release_array(&suffix);
    release_array(&answer);
    return status;
}

static kvb_status put_context(importer *in, record_writer *w, const step_context *c, kvb_error *err)
{
    uint32_t n_tokens = 0, n_ids = 0;
    step_array ids = {0};
    bool has_ids = false;
    char *path = lukv_path(in->dir, c->id, "context_ids.npy");
    kvb_status status = path ? lukv_find_optional(&has_ids, path, err) : lukv_no_memory(in, err);
    if (status == KVB_OK && has_ids) {
        status = load_ids(&ids, path, err);
        n_ids = (uint32_t)ids.npy.count;
        n_tokens = n_ids;
    }
    free(path);
    if (status == KVB_OK) status = put_scores(in, w, c, ids.values, n_ids, &n_tokens, err);
    for (size_t i = 0; i < c->n_questions && status == KVB_OK; i++)
        status = put_question(in, w, c, &c->questions[i], &n_tokens, err);
    if (status == KVB_OK) status = check_array(in, &ids, c, "context_ids.npy", err);
    release_array(&ids);
    return status;
}

// ---- The whole ----

// L and G come from the first array there is.
static kvb_status find_shape(importer *in, kvb_error *err)
{
    const lukv_steps_options *o = in->options;
    const cJSON *n_heads = cJSON_GetObjectItemCaseSensitive(in->side, "n_heads");
    const cJSON *head_dim = cJSON_GetObjectItemCaseSensitive(in->side, "head_dim");
    for (size_t i = 0; i < in->n && in->shape.n_layers == 0; i++) {
        const step_context *c = &in->contexts[i];
        uint32_t n_tokens = 0;
        step_array a;
        char *path = NULL;
        if (c->n_metrics) path = lukv_path(in->dir, c->id, "%s", c->metric_files[0]);
        else if (c->n_questions) path = lukv_path(in->dir, c->id, "question_%u.npy", c->questions[0].number);
        if (!path) continue;
        kvb_status status = load_array(in, &a, path, &n_tokens, err);
        release_array(&a);
        free(path);
        if (status != KVB_OK) return status;
    }
    if (in->shape.n_layers == 0) return kvb_fail(err, KVB_FORMAT, "%s: holds no array", in->dir);
    in->shape.n_heads = cJSON_IsNumber(n_heads) && n_heads->valueint > 0 ? (uint32_t)n_heads->valueint : 0;
    in->shape.head_dim = cJSON_IsNumber(head_dim) && head_dim->valueint > 0 ? (uint32_t)head_dim->valueint : 0;
    if (o->n_heads) in->shape.n_heads = o->n_heads;
    if (o->head_dim) in->shape.head_dim = o->head_dim;
    return KVB_OK;
}

static bool set_attribute(cJSON *into, const char *name, cJSON *value)
{
    cJSON_DeleteItemFromObjectCaseSensitive(into, name);
    return value && cJSON_AddItemToObject(into, name, value);
}

// What the arrays do not tell: which tokens each metric's solver keeps in any case. The attribute `metrics` as a
// profile writes it, {"snapkv:lukv": {"protect_sink": 4, "protect_window": 32}, ...} as text.
static bool add_protected(cJSON *into, const importer *in)
{
    char metric[METRIC_NAME_MAX + 1];
    uint32_t sink, window;
    cJSON *all = cJSON_CreateObject();
    bool ok = all != NULL;
    for (size_t i = 0; i < in->n && ok; i++) {
        for (size_t m = 0; m < in->contexts[i].n_metrics && ok; m++) {
            lukv_metric_name(metric, sizeof metric, in->contexts[i].metric_files[m]);
            if (cJSON_HasObjectItem(all, metric)) continue;
            cJSON *one = cJSON_AddObjectToObject(all, metric);
            lukv_metric_protected(metric, &sink, &window);
            ok = one && cJSON_AddNumberToObject(one, "protect_sink", sink) &&
                 cJSON_AddNumberToObject(one, "protect_window", window);
        }
    }
    char *text = ok ? cJSON_PrintUnformatted(all) : NULL;
    ok = text && set_attribute(into, "metrics", cJSON_CreateString(text));
    cJSON_free(text);
    cJSON_Delete(all);
    return ok;
}

// Those of the side file, or a word on where the numbers come from; then what the caller adds.
static cJSON *make_attributes(const importer *in)
{
    const cJSON *held = cJSON_GetObjectItemCaseSensitive(in->side, "attributes"), *a;
    cJSON *made = cJSON_IsObject(held) ? cJSON_Duplicate(held, 1) : cJSON_CreateObject();
    bool ok = made != NULL, assumed = false;
    for (size_t i = 0; i < in->n && !in->side; i++) {
        for (size_t q = 0; q < in->contexts[i].n_questions; q++)
            assumed = assumed || (in->contexts[i].questions[q].has_oracle && !in->contexts[i].questions[q].has_answer);
    }
    if (ok && !in->side) ok = set_attribute(made, "imported_from", cJSON_CreateString("lukv-steps"));
    if (ok && !in->side) ok = set_attribute(made, "n_queries_assumed", cJSON_CreateBool(assumed));
    if (ok && !in->side) ok = add_protected(made, in);
    cJSON_ArrayForEach(a, in->options->attributes)
    {
        if (ok) ok = set_attribute(made, a->string, cJSON_Duplicate(a, 1));
    }
    if (ok) return made;
    cJSON_Delete(made);
    return NULL;
}

static kvb_status write_record(importer *in, const char *record_path, kvb_error *err)
{
    record_writer *w = NULL;
    cJSON *attributes = make_attributes(in);
    const char **ids = calloc(in->n, sizeof *ids);
    kvb_status status = attributes && ids ? KVB_OK : lukv_no_memory(in, err);
    if (status == KVB_OK) status = record_begin(&w, record_path, &in->shape, attributes, in->options->start, err);
    for (size_t i = 0; i < in->n && status == KVB_OK; i++) {
        ids[i] = in->contexts[i].id;
        status = put_context(in, w, &in->contexts[i], err);
    }
    if (status == KVB_OK) status = record_finish(w, ids, in->n, err);
    record_writer_free(w);
    free(ids);
    cJSON_Delete(attributes);
    return status;
}

kvb_status lukv_steps_import(const char *dir, const char *record_path, const lukv_steps_options *options,
                             kvb_error *err)
{
    const lukv_steps_options none = {0};
    importer in = {.dir = dir, .options = options ? options : &none};
    kvb_status status = lukv_scan(&in, err);
    if (status == KVB_OK) status = find_shape(&in, err);
    if (status == KVB_OK) status = write_record(&in, record_path, err);
    lukv_scan_free(&in);
    return status;
}
