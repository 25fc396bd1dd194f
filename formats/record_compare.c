// Whether two records have the same context or question, bit by bit, or a writer has what would be put now.
#include "formats/need.h"
#include "record_internal.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static kvb_status differ(const record *a, const record *b, const char *id, const char *what, kvb_error *err)
{
    return kvb_fail(
        err, KVB_MISMATCH,
        "%s and %s both have context %s, with different %s: other texts of one name, or not made by the same "
        "program on the same kind of processor; rename one, or profile it again",
        a->path, b->path, id, what);
}

static kvb_status compare_ids(const record *a, const record *b, hid_t in_a, hid_t in_b, const char *id,
                              const char *name, kvb_error *err)
{
    const record *r[2] = {a, b};
    hid_t in[2] = {in_a, in_b};
    int32_t *values[2] = {NULL, NULL};
    uint32_t n[2] = {0, 0};
    kvb_status status = KVB_OK;
    for (int i = 0; i < 2 && status == KVB_OK; i++) {
        h5_set ids;
        status = h5_open_ids(&ids, &n[i], &r[i]->file, in[i], name, err);
        if (status == KVB_OK) values[i] = need(n[i], sizeof *values[i], "token ids");
        if (status == KVB_OK && n[i]) status = h5_read_ids(&r[i]->file, &ids, values[i], err);
        h5_close_set(&ids);
    }
    if (status == KVB_OK && (n[0] != n[1] || (n[0] && memcmp(values[0], values[1], n[0] * sizeof **values) != 0)))
        status = differ(a, b, id, name, err);
    free(values[0]);
    free(values[1]);
    return status;
}

static kvb_status compare_array(layer_pair *m, const record *a, const record *b, hid_t in_a, hid_t in_b, const char *id,
                                const char *name, uint32_t n_tokens, kvb_error *err)
{
    uint32_t dims[3] = {a->shape.n_layers, a->shape.n_kv_heads, n_tokens};
    h5_set x, y = {.id = -1};
    size_t size = (size_t)dims[1] * dims[2];
    kvb_status status = h5_open_array(&x, &a->file, in_a, name, dims, err);
    if (status == KVB_OK) status = h5_open_array(&y, &b->file, in_b, name, dims, err);
    if (status == KVB_OK && size > m->size) {
        for (int i = 0; i < 2; i++) {
            free(m->layers[i]);
            m->layers[i] = need(size, sizeof(float), "values of a layer");
        }
        m->size = size;
    }
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++) {
        status = h5_read_layer(&a->file, &x, m->layers[0], err);
        if (status == KVB_OK) status = h5_read_layer(&b->file, &y, m->layers[1], err);
        if (status == KVB_OK && memcmp(m->layers[0], m->layers[1], size * sizeof(float)) != 0)
            status = differ(a, b, id, name, err);
    }
    h5_close_set(&y);
    h5_close_set(&x);
    return status;
}

kvb_status record_compare_context(layer_pair *m, const record *a, const record *b, const char *id, kvb_error *err)
{
    const record_context_info *ca = record_find_context(a, id), *cb = record_find_context(b, id);
    if (ca->n_tokens != cb->n_tokens) return differ(a, b, id, "numbers of tokens", err);
    hid_t in_a, in_b = -1, scores_a = -1, scores_b = -1;
    kvb_status status = record_open_context(&in_a, &a->file, id, err);
    if (status == KVB_OK) status = record_open_context(&in_b, &b->file, id, err);
    if (status == KVB_OK) status = compare_ids(a, b, in_a, in_b, id, "token_ids", err);
    if (status == KVB_OK) status = h5_open_group(&scores_a, &a->file, in_a, "scores", err);
    if (status == KVB_OK) status = h5_open_group(&scores_b, &b->file, in_b, "scores", err);
    for (uint32_t i = 0; i < ca->n_metrics && status == KVB_OK; i++)
        if (record_has_metric(cb, ca->metrics[i]))
            status = compare_array(m, a, b, scores_a, scores_b, id, ca->metrics[i], ca->n_tokens, err);
    h5_release(scores_b);
    h5_release(scores_a);
    h5_release(in_b);
    h5_release(in_a);
    return status;
}

kvb_status record_compare_question(layer_pair *m, const record *a, const record *b, const char *id, uint32_t number,
                                   kvb_error *err)
{
    hid_t in_a, in_b = -1, qa = -1, qb = -1;
    uint32_t na = 0, nb = 0;
    kvb_status status = record_open_context(&in_a, &a->file, id, err);
    if (status == KVB_OK) status = record_open_context(&in_b, &b->file, id, err);
    if (status == KVB_OK) status = record_open_question(&qa, &a->file, in_a, number, err);
    if (status == KVB_OK) status = record_open_question(&qb, &b->file, in_b, number, err);
    if (status == KVB_OK) status = h5_get_u32(&na, &a->file, qa, "n_queries", err);
    if (status == KVB_OK) status = h5_get_u32(&nb, &b->file, qb, "n_queries", err);
    if (status == KVB_OK && na != nb) status = differ(a, b, id, "numbers of queries", err);
    if (status == KVB_OK) status = compare_ids(a, b, qa, qb, id, "suffix_ids", err);
    if (status == KVB_OK) status = compare_ids(a, b, qa, qb, id, "answer_ids", err);
    if (status == KVB_OK && na)
        status = compare_array(m, a, b, qa, qb, id, "oracle", record_find_context(a, id)->n_tokens, err);
    h5_release(qb);
    h5_release(qa);
    h5_release(in_b);
    h5_release(in_a);
    return status;
}

// ---- What a writer already has, and what would be put now ----

// A part, or the finished record when there is no such part; `piece` must be closed.
static kvb_status open_held(const h5_file **out, h5_file *piece, const record_writer *w, const char *id,
                            bool is_question, uint32_t question, char **path, kvb_error *err)
{
    *piece = (h5_file){.id = -1};
    *path = part_path(w->folder, id, is_question, question);
    *out = piece;
    if (path_exists(*path)) return h5_open(piece, *path, err);
    *out = w->base ? &w->base->file : NULL;
    return *out ? KVB_OK : kvb_fail(err, KVB_ARGUMENT, "%s: context %s was not put yet", w->path, id);
}

static kvb_status changed(const h5_file *f, const char *id, const char *what, kvb_error *err)
{
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: context %s: %s is another than now; the input has changed since this run was stopped: start "
                    "again with --force",
                    f->name, id, what);
}

static kvb_status same_ids(const h5_file *f, hid_t group, const char *id, const char *name, const int32_t *ids,
                           uint32_t n, kvb_error *err)
{
    h5_set set;
    uint32_t held = 0;
    kvb_status status = h5_open_ids(&set, &held, f, group, name, err);
    int32_t *values = status == KVB_OK ? need((size_t)held, sizeof *values, "token ids") : NULL;
    if (status == KVB_OK && held > 0) status = h5_read_ids(f, &set, values, err);
    if (status == KVB_OK && (held != n || (n > 0 && memcmp(values, ids, n * sizeof *ids) != 0)))
        status = changed(f, id, name, err);
    free(values);
    h5_close_set(&set);
    return status;
}

static kvb_status same_array(const record_writer *w, const h5_file *f, hid_t group, const char *id, const char *name,
                             uint32_t n_tokens, const float *data, kvb_error *err)
{
    const uint32_t dims[3] = {w->shape.n_layers, w->shape.n_kv_heads, n_tokens};
    size_t size = (size_t)dims[1] * dims[2];
    h5_set set = {.id = -1};
    kvb_status status =
        h5_has_link(group, name) ? h5_open_array(&set, f, group, name, dims, err) : changed(f, id, name, err);
    float *layer = status == KVB_OK ? need(size, sizeof *layer, "values of a layer") : NULL;
    for (uint32_t l = 0; l < dims[0] && status == KVB_OK; l++) {
        status = h5_read_layer(f, &set, layer, err);
        if (status == KVB_OK && memcmp(layer, data + l * size, size * sizeof *layer) != 0)
            status = changed(f, id, name, err);
    }
    free(layer);
    h5_close_set(&set);
    return status;
}

static kvb_status same_scores(const record_writer *w, const h5_file *f, hid_t context, const char *id,
                              uint32_t n_tokens, const char *const *metrics, const float *const *scores,
                              size_t n_metrics, kvb_error *err)
{
    hid_t group;
    char **names = NULL;
    size_t n = 0;
    kvb_status status = h5_open_group(&group, f, context, "scores", err);
    if (status == KVB_OK) status = h5_list(&names, &n, f, group, err);
    if (status == KVB_OK && n != n_metrics) status = changed(f, id, "the list of metrics", err);
    for (size_t m = 0; m < n_metrics && status == KVB_OK; m++)
        status = same_array(w, f, group, id, metrics[m], n_tokens, scores[m], err);
    h5_free_names(names);
    h5_release(group);
    return status;
}

kvb_status record_same_context(const record_writer *w, const char *id, const int32_t *token_ids, uint32_t n_tokens,
                               const char *const *metrics, const float *const *scores, size_t n_metrics, kvb_error *err)
{
    h5_error_printing before = h5_quiet();
    const h5_file *f;
    h5_file piece;
    char *path;
    hid_t context = -1;
    kvb_status status = open_held(&f, &piece, w, id, false, 0, &path, err);
    if (status == KVB_OK) status = record_open_context(&context, f, id, err);
    if (status == KVB_OK) status = same_ids(f, context, id, "token_ids", token_ids, n_tokens, err);
    if (status == KVB_OK) status = same_scores(w, f, context, id, n_tokens, metrics, scores, n_metrics, err);
    h5_release(context);
    h5_close(&piece);
    free(path);
    h5_loud(before);
    return status;
}

kvb_status record_same_question(const record_writer *w, const char *id, uint32_t question, const record_question *q,
                                kvb_error *err)
{
    h5_error_printing before = h5_quiet();
    const h5_file *f;
    h5_file piece;
    char *path;
    hid_t context = -1, group = -1;
    uint32_t n_tokens = 0, n_queries = 0;
    kvb_status status = record_n_tokens(&n_tokens, w, id, err);
    if (status == KVB_OK) status = open_held(&f, &piece, w, id, true, question, &path, err);
    else {
        h5_loud(before);
        return status;
    }
    if (status == KVB_OK) status = record_open_context(&context, f, id, err);
    if (status == KVB_OK) status = record_open_question(&group, f, context, question, err);
    if (status == KVB_OK) status = h5_get_u32(&n_queries, f, group, "n_queries", err);
    if (status == KVB_OK && n_queries != q->n_queries) status = changed(f, id, "the number of queries", err);
    if (status == KVB_OK) status = same_ids(f, group, id, "suffix_ids", q->suffix_ids, q->n_suffix, err);
    if (status == KVB_OK) status = same_ids(f, group, id, "answer_ids", q->answer_ids, q->n_answer, err);
    if (status == KVB_OK && q->oracle) status = same_array(w, f, group, id, "oracle", n_tokens, q->oracle, err);
    h5_release(group);
    h5_release(context);
    h5_close(&piece);
    free(path);
    h5_loud(before);
    return status;
}
