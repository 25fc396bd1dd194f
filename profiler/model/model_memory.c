// Which tensors a model has, and what its weights take of memory: both from the same walk over its tensors.
#include "profiler/model/expert_tensors.h"
#include "profiler/model/model_tensors.h"
#include "profiler/model/tensor_entries.h"
#include "profiler/weights/gguf.h"
#include "runtime/fail.h"
#include <stdlib.h>

unsigned model_hold(const model *m, uint32_t group, bool rows)
{
    return HOLD_MAPPED | (rows ? HOLD_ROWS : 0) | (group >= m->n_held ? HOLD_IN_PLACE : 0) |
           (m->form == WEIGHTS_HALF ? HOLD_HALF : 0) | (m->form == WEIGHTS_WIDE ? HOLD_WIDE : 0);
}

unsigned model_hold_embedding(const model *m, bool tied)
{
    return model_hold(m, 0, true) | (tied ? 0 : HOLD_IN_PLACE);
}

void model_count_matrix(model *m, uint32_t group, const stored_matrix *w, bool rows, bool maps)
{
    const backend *b = m->device->b;
    weight_room *to = &m->rooms[group];
    uint32_t values, bytes;
    unsigned own = model_hold(m, group, rows) & ~(unsigned)HOLD_IN_PLACE;
    uint64_t held = b->matrix_bytes(m->device, w, own);
    stored_type_block(w->type, &values, &bytes);
    to->held += held;
    to->in_place += maps ? b->matrix_bytes(m->device, w, own | HOLD_IN_PLACE) : held;
    to->file += maps ? (uint64_t)w->out * w->in / values * bytes : 0;
    m->most_terms = w->in > m->most_terms ? w->in : m->most_terms;
    m->has_halves = m->has_halves || (w->type == GGUF_TENSOR_BF16 && m->form != WEIGHTS_WIDE);
}

// The layer's own matrices and vectors, and what the oracle keeps of them.
static kvb_status claim_layer(model *m, weights *w, uint32_t layer, kvb_error *err)
{
    const model_config *c = &m->config;
    tensor_entry matrices[N_MATRICES], vectors[N_VECTORS];
    weight_tensor t;
    kvb_status status = KVB_OK;
    entries_matrices(matrices, c);
    entries_vectors(vectors, c);
    for (int i = 0; status == KVB_OK && i < N_MATRICES; i++) {
        const tensor_entry *e = &matrices[i];
        if (!entry_in_layer(e, c, layer)) continue;
        t.type = e->role == TENSOR_ROUTER ? weights_default_type(w) : weights_layer_type(w);
        if (weights_has_tensors(w)) status = entry_find(&t, w, m->family, e, layer, err);
        const stored_matrix stored = {.type = t.type, .out = e->rows, .in = e->columns};
        if (status == KVB_OK) model_count_matrix(m, layer + 1, &stored, e->role == TENSOR_WO, true);
    }
    uint64_t floats = (uint64_t)c->n_heads * c->head_dim * c->head_dim; // value_root
    for (int i = 0; status == KVB_OK && i < N_VECTORS; i++) {
        if (!entry_in_layer(&vectors[i], c, layer)) continue;
        floats += (uint64_t)vectors[i].rows * vectors[i].columns;
        if (weights_has_tensors(w)) status = entry_find(&t, w, m->family, &vectors[i], layer, err);
    }
    m->rooms[layer + 1].held += floats * sizeof(float);
    m->rooms[layer + 1].in_place += floats * sizeof(float);
    return status == KVB_OK && layer_set_has(&c->sparse, layer) ? experts_claim(m, w, layer, err) : status;
}

static kvb_status find_norm(const model *m, weights *w, kvb_error *err)
{
    weight_tensor t;
    return tensor_find(&t, w, tensor_norm_name(w), 1, m->config.width, err);
}

static kvb_status claim_ends(model *m, weights *w, kvb_error *err)
{
    const model_config *c = &m->config;
    weight_tensor t = {.type = weights_default_type(w)}, head = t;
    bool tied, has = weights_has_tensors(w);
    kvb_status status = tensor_find_head(&head, &tied, c, m->family, w, err);
    if (status == KVB_OK && has) status = tensor_find(&t, w, tensor_embedding_name(w), c->vocabulary, c->width, err);
    stored_matrix stored = {.type = t.type, .out = c->vocabulary, .in = c->width};
    if (status == KVB_OK && tied) model_count_matrix(m, 0, &stored, true, true);
    if (status != KVB_OK || tied) return status == KVB_OK && has ? find_norm(m, w, err) : status;
    uint64_t rows = m->device->b->matrix_bytes(m->device, &stored, model_hold_embedding(m, false));
    m->rooms[0] = (weight_room){rows, rows, 0};
    stored.type = head.type;
    model_count_matrix(m, 0, &stored, false, true);
    return has ? find_norm(m, w, err) : KVB_OK;
}

kvb_status model_claim_tensors(model *m, weights *w, kvb_error *err)
{
    const model_config *c = &m->config;
    m->rooms = calloc(c->n_layers + 1, sizeof *m->rooms);
    m->n_held = c->n_layers + 1;
    kvb_status status = m->rooms ? claim_ends(m, w, err) : kvb_fail(err, KVB_MEMORY, "%s: no memory", weights_name(w));
    for (uint32_t layer = 0; status == KVB_OK && layer < c->n_layers; layer++) status = claim_layer(m, w, layer, err);
    const char *left = status == KVB_OK ? weights_unclaimed(w) : NULL;
    if (left)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: tensor '%.100s' is not part of the %s architecture with %u layers; leaving it out would "
                        "change the numbers",
                        weights_name(w), left, c->architecture, c->n_layers);
    return status;
}

uint64_t model_weight_bytes(const model *m, uint32_t n_held)
{
    uint64_t all = 0;
    for (uint32_t g = 0; g <= m->config.n_layers; g++) all += g < n_held ? m->rooms[g].held : m->rooms[g].in_place;
    return all;
}

uint64_t model_mapped_bytes(const model *m, uint32_t n_held)
{
    uint64_t all = 0;
    for (uint32_t g = n_held; g <= m->config.n_layers; g++) all += m->rooms[g].file;
    return all;
}

uint32_t model_fit_weights(const model *m, uint64_t bytes)
{
    uint32_t all = m->config.n_layers + 1, n = all;
    if (model_weight_bytes(m, 0) >= model_weight_bytes(m, all)) return all; // this backend reads nothing in place
    while (n > 0 && model_weight_bytes(m, n) > bytes) n--;
    return n;
}

uint32_t model_made_terms(const model *m)
{
    bool made = m->has_halves || m->form == WEIGHTS_HALF || m->n_held <= m->config.n_layers;
    return made ? m->most_terms : 0;
}

uint32_t model_context_rows(const model *m)
{
    enum { ROWS = BACKEND_CHUNK_ROWS - 64 }; // below a chunk, where a row's bits do not depend on their number
    uint32_t own = m->device->b->context_rows;
    bool many = m->n_held <= m->config.n_layers || m->config.n_experts;
    return many && own < ROWS ? ROWS : own;
}
