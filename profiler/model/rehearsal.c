#include "profiler/model/rehearsal.h"
#include "formats/need.h"
#include "profiler/model/model_tensors.h"
#include "profiler/model/tensor_entries.h"
#include "profiler/weights/gguf.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// Bytes of which every type makes small finite numbers, with and without a sign where floats have one; and experts that
// are made, whose matrices the others share.
enum { FILL = 0x3c, SIGN = 0x80, DISTINCT_EXPERTS = 16, EXPERT_MATRICES = 3 };

// More than caches hold: values of the output matrix, and of a layer whose weights all layers share.
enum { HEAD_VALUES = 1 << 25, LAYER_VALUES = 1 << 24, NARROW_VOCABULARY = 4096 };

// The types that a layer's matrices have in the file, and those of the output.
typedef struct types {
    uint32_t own[N_MATRICES];
    uint32_t experts, head;
} types;

static kvb_status find_head_type(uint32_t *out, const model *m, kvb_error *err)
{
    weight_tensor t = {.type = *out};
    bool tied = false;
    if (!weights_has_tensors(m->source)) return KVB_OK;
    kvb_status status = tensor_find_head(&t, &tied, &m->config, m->family, m->source, err);
    if (status == KVB_OK && tied)
        status =
            tensor_find(&t, m->source, tensor_embedding_name(m->source), m->config.vocabulary, m->config.width, err);
    if (status == KVB_OK) *out = t.type;
    return status;
}

static kvb_status find_types(types *out, const model *m, uint32_t layer, bool narrow, kvb_error *err)
{
    tensor_entry matrices[N_MATRICES];
    uint32_t plain = narrow ? GGUF_TENSOR_F32 : weights_layer_type(m->source);
    entries_matrices(matrices, &m->config);
    out->experts = m->expert_type;
    out->head = narrow ? plain : weights_default_type(m->source);
    for (int i = 0; i < N_MATRICES; i++) {
        weight_tensor t = {.type = plain};
        bool there = entry_in_layer(&matrices[i], &m->config, layer) && weights_has_tensors(m->source);
        kvb_status status = there ? entry_find(&t, m->source, m->family, &matrices[i], layer, err) : KVB_OK;
        if (status != KVB_OK) return status;
        out->own[i] = narrow ? plain : t.type;
    }
    return narrow ? KVB_OK : find_head_type(&out->head, m, err);
}

// Layers of the kind of `layer`.
static void set_config(model_config *c, uint32_t layer, bool narrow)
{
    layer_set *const sets[] = {&c->sparse, &c->unrotated, &c->bounded};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        bool has = layer_set_has(sets[i], layer);
        *sets[i] = (layer_set){{0}};
        for (uint32_t l = 0; has && l < REHEARSAL_MOST_LAYERS; l++) layer_set_add(sets[i], l);
    }
    uint32_t most = narrow ? NARROW_VOCABULARY : HEAD_VALUES / c->width;
    if (most < NARROW_VOCABULARY) most = NARROW_VOCABULARY;
    if (c->vocabulary > most) c->vocabulary = most;
    if (!narrow) return;
    c->width = c->ffn_width = REHEARSAL_WIDTH;
    c->switches &= ~(unsigned)(EXPERTS | EXPERT_BIAS);
    c->n_experts = c->n_used = c->expert_width = 0;
    c->sparse = (layer_set){{0}};
}

static size_t bytes_of(uint32_t type, uint64_t rows, uint64_t columns)
{
    uint32_t values, bytes;
    stored_type_block(type, &values, &bytes);
    return (size_t)((rows * columns + values - 1) / values * bytes);
}

static size_t largest(size_t a, size_t b)
{
    return a > b ? a : b;
}

// Signs are random, by a linear congruential generator: what all tokens have in common stays small.
static void fill(uint8_t *bytes, size_t n)
{
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(FILL | (state >> 24 & SIGN));
    }
}

static uint64_t values_of(const model_config *c)
{
    tensor_entry matrices[N_MATRICES];
    uint64_t values = 0;
    entries_matrices(matrices, c);
    for (int i = 0; i < N_MATRICES; i++)
        if (entry_in_layer(&matrices[i], c, 0)) values += (uint64_t)matrices[i].rows * matrices[i].columns;
    return values;
}

static size_t fill_bytes(const model_config *c, const types *t)
{
    tensor_entry matrices[N_MATRICES];
    size_t most = bytes_of(GGUF_TENSOR_F32, c->vocabulary, c->width);
    entries_matrices(matrices, c);
    for (int i = 0; i < N_MATRICES; i++)
        if (entry_in_layer(&matrices[i], c, 0))
            most = largest(most, bytes_of(t->own[i], matrices[i].rows, matrices[i].columns));
    return largest(most, bytes_of(t->experts, c->expert_width, c->width));
}

static bool make_matrix(dev_matrix *out, const rehearsal *r, uint32_t type, uint32_t rows, uint32_t columns,
                        unsigned hold)
{
    const model *m = &r->m;
    const stored_matrix w = {.type = type, .data = r->bytes, .out = rows, .in = columns};
    *out = m->device->b->matrix_load(m->device, &w, hold);
    return out->address || out->packed;
}

static bool make_ones(dev *out, const model *m, size_t n, float *ones)
{
    for (size_t i = 0; i < n; i++) ones[i] = 1;
    *out = m->device->b->alloc(m->device, n);
    if (out->address) m->device->b->upload(m->device, *out, ones, n);
    return out->address;
}

static bool make_experts(model_layer *to, const rehearsal *r, const types *t, unsigned hold)
{
    const model_config *c = &r->m.config;
    uint32_t n = EXPERT_MATRICES * c->n_experts, own = EXPERT_MATRICES * DISTINCT_EXPERTS;
    bool ok = true;
    to->experts = need(n, sizeof *to->experts, "matrices of experts");
    for (uint32_t i = 0; ok && i < n; i++) {
        bool down = i % EXPERT_MATRICES == EXPERT_MATRICES - 1;
        if (i >= own) to->experts[i] = to->experts[i % own];
        else
            ok = make_matrix(&to->experts[i], r, t->experts, down ? c->width : c->expert_width,
                             down ? c->expert_width : c->width, hold);
    }
    return ok;
}

static bool make_layer(model_layer *to, const rehearsal *r, const types *t, float *ones)
{
    const model *m = &r->m;
    const model_config *c = &m->config;
    tensor_entry matrices[N_MATRICES], vectors[N_VECTORS];
    bool ok = true;
    entries_matrices(matrices, c);
    entries_vectors(vectors, c);
    for (int i = 0; ok && i < N_MATRICES; i++)
        if (entry_in_layer(&matrices[i], c, 0))
            ok = make_matrix((dev_matrix *)((char *)to + matrices[i].field), r, t->own[i], matrices[i].rows,
                             matrices[i].columns, model_hold(m, 1, matrices[i].role == TENSOR_WO));
    for (int i = 0; ok && i < N_VECTORS; i++)
        if (entry_in_layer(&vectors[i], c, 0))
            ok = make_ones((dev *)((char *)to + vectors[i].field), m, (size_t)vectors[i].rows * vectors[i].columns,
                           ones);
    if (ok) ok = make_ones(&to->value_root, m, (size_t)c->n_heads * c->head_dim * c->head_dim, ones);
    if (ok && layer_set_has(&c->sparse, 0)) ok = make_experts(to, r, t, model_hold(m, 1, false));
    if (ok && c->switches & EXPERT_BIAS)
        ok = make_ones(&to->expert_bias, m, c->n_experts * (2ull * c->expert_width + c->width), ones);
    return ok;
}

static kvb_status make_all(rehearsal *r, const types *t, kvb_error *err)
{
    model *m = &r->m;
    const model_config *c = &m->config;
    size_t roots = (size_t)c->n_heads * c->head_dim * c->head_dim,
           biases = c->n_experts * (2ull * c->expert_width + c->width),
           widest = largest(largest(roots, biases), largest(c->width, c->ffn_width));
    size_t n_fill = fill_bytes(c, t);
    float *ones = need(largest(widest, (size_t)c->n_heads * c->head_dim), sizeof *ones, "values of a vector");
    r->bytes = need_more(NULL, n_fill, 1, "bytes of made-up weights");
    m->layers = need(c->n_layers, sizeof *m->layers, "layers");
    fill(r->bytes, n_fill);
    bool ok = make_matrix(&m->embedding, r, GGUF_TENSOR_F32, c->vocabulary, c->width, HOLD_ROWS | HOLD_MAPPED) &&
              make_matrix(&m->head, r, t->head, c->vocabulary, c->width, model_hold(m, 0, false)) &&
              make_ones(&m->final_norm, m, c->width, ones);
    for (uint32_t l = 0; ok && l < r->distinct; l++) ok = make_layer(&m->layers[l], r, t, ones);
    for (uint32_t l = r->distinct; ok && l < c->n_layers; l++) m->layers[l] = m->layers[0];
    free(ones);
    return ok ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory to measure the speed with some layers of the model");
}

kvb_status rehearsal_open(rehearsal *out, const model *m, uint32_t layer, bool narrow, kvb_error *err)
{
    types t;
    *out = (rehearsal){.m = *m};
    model *own = &out->m;
    own->device = NULL, own->layers = NULL, own->rooms = NULL, own->source = NULL;
    own->embedding = own->head = (dev_matrix){NULL, 0, 0, NULL};
    own->final_norm = (dev){NULL};
    own->head_is_tied = false;
    set_config(&own->config, layer, narrow);
    bool small = !narrow && !own->config.n_experts && values_of(&own->config) <= LAYER_VALUES;
    own->config.n_layers = small ? REHEARSAL_MOST_LAYERS : REHEARSAL_LAYERS;
    out->distinct = small ? own->config.n_layers : 1;
    own->n_held = layer + 1 < m->n_held ? own->config.n_layers + 1 : 0;
    if (narrow) own->has_halves = false;
    kvb_status status = find_types(&t, m, layer, narrow, err);
    if (status == KVB_OK) status = m->device->b->open(&own->device, m->device->b, NULL, err);
    if (status == KVB_OK) status = make_all(out, &t, err);
    if (status != KVB_OK) rehearsal_close(out);
    return status;
}

void rehearsal_close(rehearsal *r)
{
    model *m = &r->m;
    if (m->device) {
        uint32_t distinct = m->config.n_experts < DISTINCT_EXPERTS ? m->config.n_experts : DISTINCT_EXPERTS;
        m->config.n_experts = distinct; // the others share theirs
        m->config.n_layers = r->distinct;
        model_free_tensors(m);
        m->device->b->close(m->device);
    }
    free(r->bytes);
    *r = (rehearsal){.bytes = NULL};
}
