// Whether two records have the same context or question, bit by bit.
#include "record_internal.h"
#include "runtime/fail.h"
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
        if (status == KVB_OK && !(values[i] = malloc((n[i] + 1) * sizeof *values[i])))
            status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %u ids", r[i]->path, n[i]);
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
            m->layers[i] = malloc(size * sizeof(float));
        }
        m->size = m->layers[0] && m->layers[1] ? size : 0;
        if (!m->size) status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory for two layers", a->path);
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
