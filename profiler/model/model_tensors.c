#include "profiler/model/model_tensors.h"
#include "profiler/model/expert_tensors.h"
#include "profiler/model/oracle.h"
#include "profiler/model/tensor_entries.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Loading ----

// What loading needs beside the model: the source, and host buffers for what is computed from weights.
typedef struct loader {
    model *m;
    const family *f;
    weights *w;
    float *values, *roots;
} loader;

// The first of the n values, from value `before` of the tensor on, that is not finite.
static kvb_status fail_not_finite(const float *x, size_t n, size_t before, const weight_tensor *t, kvb_error *err)
{
    size_t i = 0;
    while (i + 1 < n && isfinite(x[i])) i++;
    return kvb_fail(err, KVB_NUMERIC,
                    "%s: tensor %s: value %zu of %zu is not finite; the file is damaged or overflowed when it was made",
                    t->file, t->name, before + i, (size_t)(t->rows * t->columns));
}

// Rows first .. first+rows-1 in float32, checked.
static kvb_status read_rows(float *out, const weight_tensor *t, uint32_t first, uint32_t rows, kvb_error *err)
{
    stored_matrix w = tensor_rows(t, first, rows);
    if (stored_rows(&w, 0, rows, out)) return KVB_OK;
    return fail_not_finite(out, rows * t->columns, first * t->columns, t, err);
}

static kvb_status load_matrix(dev_matrix *out, loader *in, const weight_tensor *t, uint32_t first, uint32_t rows,
                              uint32_t paired, unsigned hold, kvb_error *err)
{
    backend_device *on = in->m->device;
    stored_matrix w = tensor_rows(t, first, rows);
    w.paired = paired, w.turned = in->m->config.rope_dim;
    *out = on->b->matrix_load(on, &w, hold);
    if (out->address || out->packed) return KVB_OK;
    for (uint32_t r = 0; r < rows; r++) {
        kvb_status status = read_rows(in->values, t, first + r, 1, err);
        if (status != KVB_OK) return status;
    }
    return kvb_fail(err, KVB_MEMORY, "%s: no memory for tensor %s on backend %s", t->file, t->name, on->b->name);
}

static kvb_status upload(dev *out, loader *in, const float *values, size_t n, const char *name, kvb_error *err)
{
    backend_device *on = in->m->device;
    *out = on->b->alloc(on, n);
    if (!out->address)
        return kvb_fail(err, KVB_MEMORY, "%s: no memory for %s on backend %s", weights_name(in->w), name, on->b->name);
    on->b->upload(on, *out, values, n);
    return KVB_OK;
}

static bool is_norm(tensor_role role)
{
    return role == TENSOR_ATTN_NORM || role == TENSOR_FFN_NORM || role == TENSOR_ATTN_POST || role == TENSOR_FFN_POST ||
           role == TENSOR_Q_NORM || role == TENSOR_K_NORM || role == TENSOR_Q_ROW_NORM || role == TENSOR_K_ROW_NORM ||
           role == TENSOR_Q_HEAD_NORM || role == TENSOR_K_HEAD_NORM;
}

static bool stands_in_pairs(const loader *in, tensor_role role)
{
    bool pairs = weights_is_gguf(in->w) ? in->f->gguf_pairs : in->f->hf_pairs;
    return pairs &&
           (role == TENSOR_WQ || role == TENSOR_WK || role == TENSOR_Q_BIAS || role == TENSOR_K_BIAS ||
            role == TENSOR_Q_NORM || role == TENSOR_K_NORM || role == TENSOR_Q_HEAD_NORM || role == TENSOR_K_HEAD_NORM);
}

// From pairs that are neighbours to pairs `turned` / 2 apart, of the first so many values of each head; `head` is
// scratch.
static void unpair(float *values, uint32_t n, uint32_t d, uint32_t turned, float *head)
{
    for (uint32_t at = 0; at < n; at += d) {
        memcpy(head, values + at, turned * sizeof *head);
        for (uint32_t p = 0; p < turned / 2; p++) {
            values[at + p] = head[2 * p];
            values[at + turned / 2 + p] = head[2 * p + 1];
        }
    }
}

static kvb_status load_vector(dev *out, loader *in, const tensor_entry *e, uint32_t layer, kvb_error *err)
{
    weight_tensor t;
    kvb_status status = entry_find(&t, in->w, in->f, e, layer, err);
    if (status == KVB_OK) status = read_rows(in->values, &t, 0, e->rows, err);
    if (status != KVB_OK) return status;
    uint32_t n = e->rows * e->columns;
    bool add_one = is_norm(e->role) && in->f->hf_norm_adds_one && !weights_is_gguf(in->w);
    for (uint32_t i = 0; add_one && i < n; i++) in->values[i] += 1;
    if (stands_in_pairs(in, e->role))
        unpair(in->values, n, in->m->config.head_dim, in->m->config.rope_dim, in->values + n);
    return upload(out, in, in->values, n, t.name, err);
}

// The oracle's weights of a layer. After a norm of what attention adds, its share is W_O diag(w) v up to the norm's
// scale, which is the same for all positions of a step and cancels.
static kvb_status load_value_root(model_layer *to, loader *in, const tensor_entry *wo, const tensor_entry *post,
                                  uint32_t layer, kvb_error *err)
{
    const model_config *c = &in->m->config;
    weight_tensor t;
    float *norm = in->values + (size_t)wo->rows * wo->columns;
    kvb_status status = KVB_OK;
    if (post->there) {
        status = entry_find(&t, in->w, in->f, post, layer, err);
        if (status == KVB_OK) status = read_rows(norm, &t, 0, 1, err);
    }
    if (status == KVB_OK) status = entry_find(&t, in->w, in->f, wo, layer, err);
    if (status == KVB_OK) status = read_rows(in->values, &t, 0, wo->rows, err);
    if (status != KVB_OK) return status;
    float one = in->f->hf_norm_adds_one && !weights_is_gguf(in->w) ? 1 : 0;
    for (uint32_t r = 0; post->there && r < wo->rows; r++)
        for (uint32_t i = 0; i < wo->columns; i++) in->values[(size_t)r * wo->columns + i] *= norm[r] + one;
    status = oracle_value_root(in->roots, in->values, wo->rows, c->n_heads, c->head_dim, err);
    return status == KVB_OK
               ? upload(&to->value_root, in, in->roots, (size_t)wo->columns * c->head_dim, "value norms", err)
               : status;
}

static const tensor_entry *entry_of(const tensor_entry *list, int n, tensor_role role)
{
    for (int i = 0; i < n; i++)
        if (list[i].role == role) return &list[i];
    return NULL;
}

static kvb_status load_layer(loader *in, uint32_t layer, const tensor_entry *matrices, const tensor_entry *vectors,
                             kvb_error *err)
{
    model_layer *to = &in->m->layers[layer];
    weight_tensor t;
    kvb_status status = KVB_OK;
    for (int i = 0; status == KVB_OK && i < N_MATRICES; i++) {
        const tensor_entry *e = &matrices[i];
        if (!entry_in_layer(e, &in->m->config, layer)) continue;
        status = entry_find(&t, in->w, in->f, e, layer, err);
        if (status == KVB_OK) // CriticalKV asks for W_O's rows
            status = load_matrix((dev_matrix *)((char *)to + e->field), in, &t, e->first, e->rows,
                                 stands_in_pairs(in, e->role) ? in->m->config.head_dim : 0,
                                 model_hold(in->m, layer + 1, e->role == TENSOR_WO), err);
    }
    for (int i = 0; status == KVB_OK && i < N_VECTORS; i++)
        if (entry_in_layer(&vectors[i], &in->m->config, layer))
            status = load_vector((dev *)((char *)to + vectors[i].field), in, &vectors[i], layer, err);
    if (status == KVB_OK)
        status = load_value_root(to, in, entry_of(matrices, N_MATRICES, TENSOR_WO),
                                 entry_of(vectors, N_VECTORS, TENSOR_ATTN_POST), layer, err);
    if (status == KVB_OK && layer_set_has(&in->m->config.sparse, layer))
        status = experts_load(to, in->m, in->w, layer, err);
    return status;
}

// What stands before and behind the layers.
static kvb_status load_ends(loader *in, kvb_error *err)
{
    model *m = in->m;
    const model_config *c = &m->config;
    weight_tensor t, head;
    kvb_status status = tensor_find_head(&head, &m->head_is_tied, c, in->f, in->w, err);
    if (status == KVB_OK) status = tensor_find(&t, in->w, tensor_embedding_name(in->w), c->vocabulary, c->width, err);
    if (status == KVB_OK)
        status = load_matrix(&m->embedding, in, &t, 0, c->vocabulary, 0, model_hold_embedding(m, m->head_is_tied), err);
    if (status == KVB_OK && m->head_is_tied) m->head = m->embedding;
    else if (status == KVB_OK)
        status = load_matrix(&m->head, in, &head, 0, c->vocabulary, 0, model_hold(m, 0, false), err);
    if (status == KVB_OK) status = tensor_find(&t, in->w, tensor_norm_name(in->w), 1, c->width, err);
    if (status == KVB_OK) status = read_rows(in->values, &t, 0, 1, err);
    bool add_one = in->f->hf_norm_adds_one && !weights_is_gguf(in->w);
    for (uint32_t i = 0; add_one && i < c->width; i++) in->values[i] += 1;
    return status == KVB_OK ? upload(&m->final_norm, in, in->values, c->width, t.name, err) : status;
}

kvb_status model_load_tensors(model *m, kvb_error *err)
{
    const model_config *c = &m->config;
    weights *w = m->source;
    loader in = {m, m->family, w, NULL, NULL};
    tensor_entry matrices[N_MATRICES], vectors[N_VECTORS];
    size_t queries = (size_t)c->n_heads * c->head_dim;
    // W_O and a norm beside it; every vector, with a head beside it, and every row of a matrix is smaller than the
    // rest.
    size_t floats = queries * c->width + queries + 2 * (size_t)c->width + c->ffn_width + c->head_dim + c->n_experts;
    in.values = malloc(floats * sizeof(float));
    in.roots = malloc(queries * c->head_dim * sizeof(float));
    m->layers = calloc(c->n_layers, sizeof *m->layers);
    entries_matrices(matrices, c);
    entries_vectors(vectors, c);
    kvb_status status = in.values && in.roots && m->layers
                            ? load_ends(&in, err)
                            : kvb_fail(err, KVB_MEMORY, "%s: no memory to unpack its tensors", weights_name(w));
    for (uint32_t layer = 0; status == KVB_OK && layer < c->n_layers; layer++) {
        status = load_layer(&in, layer, matrices, vectors, err);
        weights_forget(w);
    }
    free(in.values);
    free(in.roots);
    return status;
}

void model_free_tensors(model *m)
{
    backend_device *on = m->device;
    for (uint32_t i = 0; m->layers && i < m->config.n_layers; i++) {
        model_layer *l = &m->layers[i];
#define FREE_MATRIX(role, field, ...) on->b->matrix_release(on, &l->field);
#define FREE_VECTOR(role, field, ...) on->b->release(on, l->field);
        LAYER_MATRICES(FREE_MATRIX)
        LAYER_VECTORS(FREE_VECTOR)
#undef FREE_MATRIX
#undef FREE_VECTOR
        on->b->release(on, l->value_root);
        experts_free(l, m);
    }
    if (!m->head_is_tied) on->b->matrix_release(on, &m->head);
    on->b->matrix_release(on, &m->embedding);
    on->b->release(on, m->final_norm);
    free(m->layers);
}
