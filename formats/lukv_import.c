// Reading the lukv-steps directory: first the names of all files, then one context after the other.
#include "file_read.h"
#include "lukv_layout.h"
#include "lukv_steps.h"
#include "names.h"
#include "npy.h"
#include "runtime/fail.h"
#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What the published protocol records at most: 64 new tokens, the first of which comes out of the prefill
// (methods.md 2.2).
enum { PUBLISHED_QUERIES = 63 };

typedef struct step_question {
    uint32_t number;
    bool has_oracle, has_suffix, has_answer;
} step_question;

typedef struct step_context {
    char *id;
    char **metric_files; // [n_metrics]
    size_t n_metrics;
    step_question *questions; // [n_questions]
    size_t n_questions;
    const cJSON *side; // its entry in the side file, or NULL
} step_context;

typedef struct importer {
    const char *dir;
    const lukv_steps_options *options;
    cJSON *side; // the side file, or NULL
    step_context *contexts;
    size_t n;
    record_shape shape;
} importer;

static kvb_status no_memory(const importer *in, kvb_error *err)
{
    return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", in->dir);
}

// A growing array: room for one more element behind `n`. False when memory is short.
static bool grow(void *array, size_t n, size_t element_size)
{
    if (n & (n - 1)) return true; // full at powers of two only
    void *larger, *old;
    memcpy(&old, array, sizeof old);
    larger = reallocarray(old, n ? 2 * n : 1, element_size);
    if (larger) memcpy(array, &larger, sizeof larger);
    return larger != NULL;
}

// ---- Names ----

static step_question *find_question(step_context *c, uint32_t number)
{
    for (size_t i = 0; i < c->n_questions; i++) {
        if (c->questions[i].number == number) return &c->questions[i];
    }
    if (!grow(&c->questions, c->n_questions, sizeof *c->questions)) return NULL;
    step_question *q = &c->questions[c->n_questions++];
    *q = (step_question){.number = number};
    return q;
}

static bool add_file(step_context *c, const char *file)
{
    uint32_t number = 0;
    lukv_kind kind = lukv_classify(file, &number);
    if (kind == LUKV_METRIC) {
        if (!grow(&c->metric_files, c->n_metrics, sizeof *c->metric_files)) return false;
        c->metric_files[c->n_metrics] = strdup(file);
        return c->metric_files[c->n_metrics++] != NULL;
    }
    if (kind == LUKV_OTHER || kind == LUKV_TOKENS) return true;
    step_question *q = find_question(c, number);
    if (!q) return false;
    q->has_oracle |= kind == LUKV_ORACLE;
    q->has_suffix |= kind == LUKV_SUFFIX;
    q->has_answer |= kind == LUKV_ANSWER;
    return true;
}

static kvb_status scan_context(importer *in, step_context *c, kvb_error *err)
{
    char *path = lukv_path(in->dir, c->id, "%s", "");
    DIR *dir = path ? opendir(path) : NULL;
    kvb_status status = KVB_OK;
    if (!dir)
        status = kvb_fail(err, KVB_IO, "%s/context_%s: cannot read the folder: %s", in->dir, c->id, strerror(errno));
    for (struct dirent *e; dir && status == KVB_OK && (e = readdir(dir));) {
        if (!add_file(c, e->d_name)) status = no_memory(in, err);
    }
    if (dir) closedir(dir);
    free(path);
    return status;
}

static int compare_questions(const void *a, const void *b)
{
    const step_question *x = a, *y = b;
    return (x->number > y->number) - (x->number < y->number);
}

static int compare_files(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// context_2 before context_10.
static int compare_contexts(const void *a, const void *b)
{
    const step_context *x = a, *y = b;
    return strverscmp(x->id, y->id);
}

static kvb_status scan(importer *in, kvb_error *err)
{
    DIR *dir = opendir(in->dir);
    if (!dir) return kvb_fail(err, KVB_IO, "%s: cannot read the folder: %s", in->dir, strerror(errno));
    kvb_status status = KVB_OK;
    for (struct dirent *e; status == KVB_OK && (e = readdir(dir));) {
        if (strncmp(e->d_name, "context_", 8) != 0) continue;
        if (!context_id_valid(e->d_name + 8)) {
            status = kvb_fail(err, KVB_FORMAT, "%s/%.100s: expected an id of " CONTEXT_ID_RULE " after context_",
                              in->dir, e->d_name);
        } else if (grow(&in->contexts, in->n, sizeof *in->contexts)) {
            step_context *c = &in->contexts[in->n++];
            *c = (step_context){.id = strdup(e->d_name + 8)};
            status = c->id ? scan_context(in, c, err) : no_memory(in, err);
        } else {
            status = no_memory(in, err);
        }
    }
    closedir(dir);
    if (status == KVB_OK && in->n == 0)
        status = kvb_fail(err, KVB_FORMAT, "%s: holds no folder context_<id>; expected the lukv-steps layout", in->dir);
    if (status == KVB_OK) qsort(in->contexts, in->n, sizeof *in->contexts, compare_contexts);
    for (size_t i = 0; i < in->n && status == KVB_OK; i++) { // readdir's order is no order
        step_context *c = &in->contexts[i];
        if (c->n_questions) qsort(c->questions, c->n_questions, sizeof *c->questions, compare_questions);
        if (c->n_metrics) qsort(c->metric_files, c->n_metrics, sizeof *c->metric_files, compare_files);
    }
    return status;
}

// ---- The side file ----

static kvb_status bad_side_file(const importer *in, const char *what, kvb_error *err)
{
    return kvb_fail(err, KVB_FORMAT, "%s/" LUKV_SIDE_FILE ": %s; remove the file to import the arrays alone", in->dir,
                    what);
}

static const cJSON *side_entry(const cJSON *list, const char *key, const char *text, double number)
{
    const cJSON *entry;
    cJSON_ArrayForEach(entry, list)
    {
        const cJSON *value = cJSON_GetObjectItemCaseSensitive(entry, key);
        if (text ? cJSON_IsString(value) && strcmp(value->valuestring, text) == 0
                 : cJSON_IsNumber(value) && value->valuedouble == number)
            return entry;
    }
    return NULL;
}

static kvb_status load_side_file(importer *in, kvb_error *err)
{
    char *path = NULL;
    if (asprintf(&path, "%s/" LUKV_SIDE_FILE, in->dir) < 0) return no_memory(in, err);
    file_view view = {0};
    FILE *probe = fopen(path, "rb");
    kvb_status status = KVB_OK;
    if (probe) {
        fclose(probe);
        status = file_map(&view, path, err);
    }
    free(path);
    if (!probe || status != KVB_OK) return status;
    in->side = cJSON_ParseWithLength((const char *)view.data, view.size);
    file_unmap(&view);
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(in->side, "format");
    const cJSON *version = cJSON_GetObjectItemCaseSensitive(in->side, "format_version");
    if (!cJSON_IsString(format) || strcmp(format->valuestring, LUKV_SIDE_FORMAT) != 0)
        return bad_side_file(in, "expected JSON with format = \"" LUKV_SIDE_FORMAT "\"", err);
    if (!cJSON_IsNumber(version) || version->valuedouble != 1)
        return kvb_fail(err, KVB_VERSION, "%s/" LUKV_SIDE_FILE ": expected format_version 1; use a newer kvbudget",
                        in->dir);
    return KVB_OK;
}

// Contexts in the order of the side file, and the questions that it knows of and that have left no file.
static kvb_status apply_side_file(importer *in, kvb_error *err)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(in->side, "contexts"), *entry, *question;
    size_t placed = 0;
    cJSON_ArrayForEach(entry, list)
    {
        const cJSON *id = cJSON_GetObjectItemCaseSensitive(entry, "id");
        size_t i = placed;
        while (i < in->n && !(cJSON_IsString(id) && strcmp(in->contexts[i].id, id->valuestring) == 0)) i++;
        if (i == in->n) return bad_side_file(in, "names a context that has no folder", err);
        step_context c = in->contexts[i];
        memmove(&in->contexts[placed + 1], &in->contexts[placed], (i - placed) * sizeof c);
        c.side = entry;
        in->contexts[placed] = c;
        cJSON_ArrayForEach(question, cJSON_GetObjectItemCaseSensitive(entry, "questions"))
        {
            const cJSON *number = cJSON_GetObjectItemCaseSensitive(question, "number");
            if (!cJSON_IsNumber(number) || !(number->valuedouble >= 0 && number->valuedouble <= UINT32_MAX))
                return bad_side_file(in, "a question has no number", err);
            if (!find_question(&in->contexts[placed], (uint32_t)number->valuedouble)) return no_memory(in, err);
        }
        step_context *c_placed = &in->contexts[placed++];
        if (c_placed->n_questions)
            qsort(c_placed->questions, c_placed->n_questions, sizeof *c_placed->questions, compare_questions);
    }
    if (placed < in->n) return bad_side_file(in, "does not name every context that has a folder", err);
    return KVB_OK;
}

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

static kvb_status put_scores(importer *in, record_writer *w, const step_context *c, const int32_t *ids, uint32_t n_ids,
                             uint32_t *n_tokens, kvb_error *err)
{
    step_array *arrays = calloc(c->n_metrics + 1, sizeof *arrays);
    const float **scores = calloc(c->n_metrics + 1, sizeof *scores);
    char(*names)[METRIC_NAME_MAX + 1] = calloc(c->n_metrics + 1, sizeof *names);
    const char **name_list = calloc(c->n_metrics + 1, sizeof *name_list);
    kvb_status status = arrays && scores && names && name_list ? KVB_OK : no_memory(in, err);
    const cJSON *known = cJSON_GetObjectItemCaseSensitive(c->side, "metrics");
    for (size_t m = 0; m < c->n_metrics && status == KVB_OK; m++) {
        const cJSON *name = cJSON_GetObjectItemCaseSensitive(known, c->metric_files[m]);
        if (cJSON_IsString(name)) snprintf(names[m], sizeof names[m], "%s", name->valuestring);
        else lukv_metric_name(names[m], sizeof names[m], c->metric_files[m]);
        name_list[m] = names[m];
        char *path = lukv_path(in->dir, c->id, "%s", c->metric_files[m]);
        status = path ? load_array(in, &arrays[m], path, n_tokens, err) : no_memory(in, err);
        scores[m] = arrays[m].values;
        free(path);
    }
    int32_t *unknown = NULL;
    if (status == KVB_OK && ids && n_ids != *n_tokens)
        status = kvb_fail(err, KVB_MISMATCH, "%s/context_%s/context_ids.npy: %u ids for arrays of %u tokens", in->dir,
                          c->id, n_ids, *n_tokens);
    if (status == KVB_OK && !ids) {
        unknown = malloc((size_t)*n_tokens * sizeof *unknown + 1);
        if (!unknown) status = no_memory(in, err);
        for (uint32_t t = 0; t < *n_tokens && unknown; t++) unknown[t] = -1;
        ids = unknown;
    }
    if (status == KVB_OK) status = record_put_context(w, c->id, ids, *n_tokens, name_list, scores, c->n_metrics, err);
    for (size_t m = 0; m < c->n_metrics && arrays; m++) release_array(&arrays[m]);
    free(unknown);
    free(name_list);
    free(names);
    free(scores);
    free(arrays);
    return status;
}

// The side file knows; else the answer tells, whose first token comes out of the prefill; else the options.
static uint32_t count_queries(const importer *in, const step_context *c, const step_question *q, uint32_t n_answer)
{
    const cJSON *entry =
        side_entry(cJSON_GetObjectItemCaseSensitive(c->side, "questions"), "number", NULL, (double)q->number);
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
    kvb_status status = path ? load_ids(a, path, err) : no_memory(in, err);
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
        status = path ? load_array(in, &oracle, path, n_tokens, err) : no_memory(in, err);
        free(path);
    }
    if (status == KVB_OK) {
        record_question one = {oracle.values,
                               suffix.values,
                               (uint32_t)suffix.npy.count,
                               answer.values,
                               (uint32_t)answer.npy.count,
                               count_queries(in, c, q, (uint32_t)answer.npy.count)};
        status = record_put_question(w, c->id, q->number, &one, err);
    }
    release_array(&oracle);
    release_array(&suffix);
    release_array(&answer);
    return status;
}

static kvb_status put_context(importer *in, record_writer *w, const step_context *c, kvb_error *err)
{
    uint32_t n_tokens = 0, n_ids = 0;
    step_array ids = {0};
    kvb_status status = KVB_OK;
    char *path = lukv_path(in->dir, c->id, "context_ids.npy");
    FILE *probe = path ? fopen(path, "rb") : NULL;
    if (probe) {
        fclose(probe);
        status = load_ids(&ids, path, err);
        n_ids = (uint32_t)ids.npy.count;
        n_tokens = n_ids;
    }
    free(path);
    if (status == KVB_OK && !record_writer_has_context(w, c->id))
        status = put_scores(in, w, c, ids.values, n_ids, &n_tokens, err);
    for (size_t i = 0; i < c->n_questions && status == KVB_OK; i++) {
        if (!record_writer_has_question(w, c->id, c->questions[i].number))
            status = put_question(in, w, c, &c->questions[i], &n_tokens, err);
    }
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
    kvb_status status = attributes && ids ? KVB_OK : no_memory(in, err);
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
    kvb_status status = scan(&in, err);
    if (status == KVB_OK) status = load_side_file(&in, err);
    if (status == KVB_OK && in.side) status = apply_side_file(&in, err);
    if (status == KVB_OK) status = find_shape(&in, err);
    if (status == KVB_OK) status = write_record(&in, record_path, err);
    for (size_t i = 0; i < in.n; i++) {
        for (size_t m = 0; m < in.contexts[i].n_metrics; m++) free(in.contexts[i].metric_files[m]);
        free(in.contexts[i].metric_files);
        free(in.contexts[i].questions);
        free(in.contexts[i].id);
    }
    free(in.contexts);
    cJSON_Delete(in.side);
    return status;
}
