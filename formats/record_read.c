#include "formats/need.h"
#include "names.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include "sha256.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Opening: the whole structure is checked, no array is read ----

static void dims_of(uint32_t dims[3], const record *r, const context_entry *c)
{
    dims[0] = r->shape.n_layers;
    dims[1] = r->shape.n_kv_heads;
    dims[2] = c->info.n_tokens;
}

static kvb_status scan_metrics(record *r, context_entry *c, hid_t context, kvb_error *err)
{
    uint32_t dims[3];
    dims_of(dims, r, c);
    hid_t scores;
    h5_set array;
    size_t n = 0;
    kvb_status status = h5_open_group(&scores, &r->file, context, "scores", err);
    if (status == KVB_OK) status = h5_list(&c->metrics, &n, &r->file, scores, err);
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        if (!metric_name_valid(c->metrics[i])) {
            status = h5_fail(err, KVB_FORMAT, r->path, scores, NULL,
                             "expected metric names of " METRIC_NAME_RULE ", found another");
            break;
        }
        status = h5_open_array(&array, &r->file, scores, c->metrics[i], dims, err);
        h5_close_set(&array);
    }
    h5_release(scores);
    c->info.metrics = (const char *const *)c->metrics;
    c->info.n_metrics = (uint32_t)n;
    return status;
}

static kvb_status scan_question(record *r, context_entry *c, hid_t questions, const char *name, kvb_error *err)
{
    char *end;
    unsigned long long number = name[0] >= '0' && name[0] <= '9' ? strtoull(name, &end, 10) : UINT64_MAX;
    if (number > UINT32_MAX || *end || (name[0] == '0' && name[1]))
        return h5_fail(err, KVB_FORMAT, r->path, questions, NULL, "expected numbers as names, found \"%.40s\"", name);
    record_question_info *q = &c->questions[c->info.n_questions++];
    uint32_t dims[3];
    dims_of(dims, r, c);
    hid_t group;
    h5_set set;
    q->number = (uint32_t)number;
    kvb_status status = h5_open_group(&group, &r->file, questions, name, err);
    if (status != KVB_OK) return status;
    status = h5_get_u32(&q->n_queries, &r->file, group, "n_queries", err);
    if (status == KVB_OK) {
        status = h5_open_ids(&set, &q->n_suffix, &r->file, group, "suffix_ids", err);
        h5_close_set(&set);
    }
    if (status == KVB_OK) {
        status = h5_open_ids(&set, &q->n_answer, &r->file, group, "answer_ids", err);
        h5_close_set(&set);
    }
    if (status == KVB_OK && q->n_queries > 0) {
        status = h5_open_array(&set, &r->file, group, "oracle", dims, err);
        h5_close_set(&set);
    } else if (status == KVB_OK && h5_has_link(group, "oracle")) {
        status = h5_fail(err, KVB_FORMAT, r->path, group, "oracle", "is there though n_queries is 0");
    }
    if (status == KVB_OK) status = record_scan_losses(r, group, err);
    h5_release(group);
    return status;
}

static int compare_questions(const void *a, const void *b)
{
    const record_question_info *x = a, *y = b;
    return (x->number > y->number) - (x->number < y->number);
}

static kvb_status scan_questions(record *r, context_entry *c, hid_t context, kvb_error *err)
{
    hid_t questions;
    char **names = NULL;
    size_t n = 0;
    kvb_status status = h5_open_group(&questions, &r->file, context, "questions", err);
    if (status == KVB_OK) status = h5_list(&names, &n, &r->file, questions, err);
    if (status == KVB_OK) {
        c->questions = need(n, sizeof *c->questions, "questions");
    }
    for (size_t i = 0; i < n && status == KVB_OK; i++) status = scan_question(r, c, questions, names[i], err);
    if (status == KVB_OK) qsort(c->questions, c->info.n_questions, sizeof *c->questions, compare_questions);
    c->info.questions = c->questions;
    h5_free_names(names);
    h5_release(questions);
    return status;
}

static kvb_status scan_context(record *r, hid_t contexts, const char *id, kvb_error *err)
{
    if (!context_id_valid(id))
        return h5_fail(err, KVB_FORMAT, r->path, contexts, NULL, "expected ids of " CONTEXT_ID_RULE ", found \"%.80s\"",
                       id);
    context_entry *c = &r->contexts[r->n++];
    hid_t context;
    h5_set tokens;
    c->id = need_text("%s", id);
    c->info.id = c->id;
    kvb_status status = h5_open_group(&context, &r->file, contexts, id, err);
    if (status != KVB_OK) return status;
    status = h5_get_u32(&c->order, &r->file, context, "order", err);
    if (status == KVB_OK) {
        status = h5_open_ids(&tokens, &c->info.n_tokens, &r->file, context, "token_ids", err);
        h5_close_set(&tokens);
    }
    if (status == KVB_OK) status = record_tokens_check(&r->shape, c->info.n_tokens, r->path, err);
    if (status == KVB_OK) status = scan_metrics(r, c, context, err);
    if (status == KVB_OK) status = scan_questions(r, c, context, err);
    h5_release(context);
    return status;
}

static int compare_order(const void *a, const void *b)
{
    const context_entry *x = a, *y = b;
    return (x->order > y->order) - (x->order < y->order);
}

static kvb_status scan_contexts(record *r, kvb_error *err)
{
    hid_t contexts;
    char **names = NULL;
    size_t n = 0;
    kvb_status status = h5_open_group(&contexts, &r->file, r->file.id, "contexts", err);
    if (status == KVB_OK) status = h5_list(&names, &n, &r->file, contexts, err);
    if (status == KVB_OK) {
        r->contexts = need(n, sizeof *r->contexts, "contexts");
    }
    for (size_t i = 0; i < n && status == KVB_OK; i++) status = scan_context(r, contexts, names[i], err);
    if (status == KVB_OK) qsort(r->contexts, r->n, sizeof *r->contexts, compare_order);
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        if (r->contexts[i].order != i)
            status = h5_fail(err, KVB_FORMAT, r->path, contexts, r->contexts[i].id,
                             "attribute order: expected each of 0 to %zu once, found %u", n - 1, r->contexts[i].order);
    }
    h5_free_names(names);
    h5_release(contexts);
    return status;
}

static kvb_status load(record *r, kvb_error *err)
{
    kvb_status status = record_root_read(&r->file, &r->shape, &r->attributes, err);
    return status == KVB_OK ? scan_contexts(r, err) : status;
}

static void close_quietly(record *r)
{
    for (size_t i = 0; i < r->n; i++) {
        free(r->contexts[i].id);
        free(r->contexts[i].questions);
        h5_free_names(r->contexts[i].metrics);
    }
    h5_close(&r->file);
    free(r->contexts);
    cJSON_Delete(r->attributes);
    free(r->path);
    free(r);
}

static kvb_status explain_unfinished(const char *path, kvb_error *err)
{
    char *folder = parts_path(path);
    kvb_status status = KVB_OK;
    if (folder && !path_exists(path) && parts_have_head(folder))
        status = kvb_fail(err, KVB_IO,
                          "%s: the run that writes it is not finished (what there is lies in %s); "
                          "go on with the same command and --resume",
                          path, folder);
    free(folder);
    return status;
}

static kvb_status open_record(record **out, const char *path, const void *data, size_t size, kvb_error *err)
{
    *out = NULL;
    record *r = need(1, sizeof *r, "records");
    r->path = need_text("%s", path);
    h5_error_printing before = h5_quiet();
    kvb_status status = data ? h5_open_memory(&r->file, data, size, r->path, err) : h5_open(&r->file, r->path, err);
    if (status == KVB_OK) status = load(r, err);
    if (status != KVB_OK) close_quietly(r);
    else *out = r;
    h5_loud(before);
    return status;
}

kvb_status record_open(record **out, const char *path, kvb_error *err)
{
    *out = NULL;
    kvb_status status = explain_unfinished(path, err);
    return status == KVB_OK ? open_record(out, path, NULL, 0, err) : status;
}

kvb_status record_open_memory(record **out, const void *data, size_t size, const char *name, kvb_error *err)
{
    *out = NULL;
    if (!data) return kvb_fail(err, KVB_ARGUMENT, "%s: no data", name);
    return open_record(out, name, data, size, err);
}

void record_close(record *r)
{
    if (!r) return;
    h5_error_printing before = h5_quiet();
    close_quietly(r);
    h5_loud(before);
}

// ---- What is in it ----

record_shape record_get_shape(const record *r)
{
    return r->shape;
}

const cJSON *record_attributes(const record *r)
{
    return r->attributes;
}

bool record_has_sums(const record *r)
{
    return r->file.sums;
}

kvb_status record_file_sha256(const record *r, char out[65], kvb_error *err)
{
    kvb_status status = sha256_descriptor_hex(r->file.descriptor, r->path, out, err);
    return status == KVB_OK ? h5_unchanged(&r->file, err) : status;
}

size_t record_context_count(const record *r)
{
    return r->n;
}

const record_context_info *record_context(const record *r, size_t i)
{
    return i < r->n ? &r->contexts[i].info : NULL;
}

const record_context_info *record_find_context(const record *r, const char *id)
{
    for (size_t i = 0; i < r->n; i++) {
        if (strcmp(r->contexts[i].id, id) == 0) return &r->contexts[i].info;
    }
    return NULL;
}

// ---- Arrays ----

typedef enum array_kind { SCORES, ORACLE } array_kind;

// NULL, or what is wrong with x.
static const char *number_fault(array_kind kind, float x)
{
    if (isnan(x)) return "NaN";
    if (kind == ORACLE && isinf(x)) return "infinity";
    return kind == ORACLE && x < 0 ? "a negative oracle" : NULL;
}

static kvb_status read_array(const record *r, const context_entry *c, hid_t group, const char *name, array_kind kind,
                             float *out, kvb_error *err)
{
    uint32_t dims[3];
    dims_of(dims, r, c);
    size_t layer_size = (size_t)dims[1] * dims[2];
    h5_set array;
    kvb_status status = h5_open_array(&array, &r->file, group, name, dims, err);
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++) {
        float *layer = out + l * layer_size;
        status = h5_read_layer(&r->file, &array, layer, err);
        for (size_t i = 0; i < layer_size && status == KVB_OK; i++) {
            const char *fault = number_fault(kind, layer[i]);
            if (fault)
                status = h5_fail(err, KVB_NUMERIC, r->path, array.id, NULL, "layer %u, KV head %zu, token %zu: %s", l,
                                 i / dims[2], i % dims[2], fault);
        }
    }
    h5_close_set(&array);
    return status;
}

static kvb_status read_ids(const record *r, hid_t group, const char *name, uint32_t n, int32_t *out, kvb_error *err)
{
    h5_set ids;
    uint32_t found;
    kvb_status status = h5_open_ids(&ids, &found, &r->file, group, name, err);
    if (status == KVB_OK && found != n)
        status = h5_fail(err, KVB_FORMAT, r->path, group, name, "has changed while it was read");
    if (status == KVB_OK && n > 0) status = h5_read_ids(&r->file, &ids, out, err);
    h5_close_set(&ids);
    return status;
}

static kvb_status context_at(const context_entry **out, const record *r, size_t i, kvb_error *err)
{
    *out = i < r->n ? &r->contexts[i] : NULL;
    return *out ? KVB_OK : kvb_fail(err, KVB_ARGUMENT, "%s: context %zu of %zu", r->path, i, r->n);
}

kvb_status record_read_tokens(record *r, size_t i, int32_t *out, kvb_error *err)
{
    const context_entry *c;
    kvb_status status = context_at(&c, r, i, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    hid_t context;
    status = record_open_context(&context, &r->file, c->id, err);
    if (status == KVB_OK) status = read_ids(r, context, "token_ids", c->info.n_tokens, out, err);
    h5_release(context);
    h5_loud(before);
    return status;
}

kvb_status record_read_scores(record *r, size_t i, const char *metric, float *out, kvb_error *err)
{
    const context_entry *c;
    kvb_status status = context_at(&c, r, i, err);
    if (status != KVB_OK) return status;
    h5_error_printing before = h5_quiet();
    hid_t context, scores = -1;
    status = record_open_context(&context, &r->file, c->id, err);
    if (status == KVB_OK) status = h5_open_group(&scores, &r->file, context, "scores", err);
    if (status == KVB_OK && !(metric_name_valid(metric) && h5_has_link(scores, metric)))
        status = kvb_fail(err, KVB_MISMATCH, "%s: context %s has no scores of metric %.128s; it was not profiled",
                          r->path, c->id, metric);
    if (status == KVB_OK) status = read_array(r, c, scores, metric, SCORES, out, err);
    h5_release(scores);
    h5_release(context);
    h5_loud(before);
    return status;
}

typedef enum question_part { READ_ORACLE, READ_SUFFIX, READ_ANSWER } question_part;

static kvb_status read_question(record *r, size_t i, size_t index, question_part what, void *out, kvb_error *err)
{
    const context_entry *c;
    kvb_status status = context_at(&c, r, i, err);
    if (status != KVB_OK) return status;
    if (index >= c->info.n_questions)
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: question %zu of %u", r->path, c->id, index,
                        c->info.n_questions);
    const record_question_info *q = &c->questions[index];
    if (what == READ_ORACLE && q->n_queries == 0)
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %s: question %u was skipped and has no oracle", r->path, c->id,
                        q->number);
    h5_error_printing before = h5_quiet();
    hid_t context, group = -1;
    status = record_open_context(&context, &r->file, c->id, err);
    if (status == KVB_OK) status = record_open_question(&group, &r->file, context, q->number, err);
    if (status == KVB_OK) {
        if (what == READ_ORACLE) status = read_array(r, c, group, "oracle", ORACLE, out, err);
        else if (what == READ_SUFFIX) status = read_ids(r, group, "suffix_ids", q->n_suffix, out, err);
        else status = read_ids(r, group, "answer_ids", q->n_answer, out, err);
    }
    h5_release(group);
    h5_release(context);
    h5_loud(before);
    return status;
}

kvb_status record_read_oracle(record *r, size_t i, size_t question_index, float *out, kvb_error *err)
{
    return read_question(r, i, question_index, READ_ORACLE, out, err);
}

kvb_status record_read_suffix(record *r, size_t i, size_t question_index, int32_t *out, kvb_error *err)
{
    return read_question(r, i, question_index, READ_SUFFIX, out, err);
}

kvb_status record_read_answer(record *r, size_t i, size_t question_index, int32_t *out, kvb_error *err)
{
    return read_question(r, i, question_index, READ_ANSWER, out, err);
}
