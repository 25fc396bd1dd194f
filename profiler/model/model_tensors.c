// The tensors of a model: which it has and what they take of memory, found in one walk; and loading them. What is said
// of a layer's experts, which each container keeps in its own way (expert_layout of family.h), stands in front.
#include "profiler/model/model_tensors.h"
#include "formats/need.h"
#include "profiler/model/oracle.h"
#include "profiler/model/tensor_entries.h"
#include "profiler/weights/dequant.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- What a matrix takes ----

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

// ---- Experts ----

enum { GATE, UP, DOWN, MATRICES, MX_VALUES = 32, MX_BYTES = 16 };

static uint32_t rows_of(const model_config *c, int which)
{
    return which == DOWN ? c->width : c->expert_width;
}

static uint32_t columns_of(const model_config *c, int which)
{
    return which == DOWN ? c->expert_width : c->width;
}

static expert_layout layout_of(const family *f, const weights *w)
{
    return weights_is_gguf(w) ? EXPERTS_STACKED : f->experts;
}

static void layer_name(char out[128], const weights *w, uint32_t layer, const char *name)
{
    snprintf(out, 128, weights_is_gguf(w) ? "blk.%u.%s" : "model.layers.%u.%s", layer, name);
}

// A tensor whose first dimension counts experts: the others are [rows, columns].
static kvb_status find_stack(weight_tensor *out, const model_config *c, weights *w, uint32_t layer, const char *name,
                             uint64_t rows, uint64_t columns, kvb_error *err)
{
    char full[128];
    layer_name(full, w, layer, name);
    if (!weights_find(w, full, out))
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s is missing, expected [%u, %llu, %llu]", weights_name(w), full,
                        c->n_experts, (unsigned long long)rows, (unsigned long long)columns);
    weight_tensor flat = *out;
    flat.n_dims = 2;
    return tensor_check_shape(&flat, c->n_experts * rows, columns, err);
}

// The matrix `which` of expert e; of EXPERTS_STACKED the tensor holds all experts' and *first is where its rows begin.
static kvb_status find_rows(weight_tensor *out, uint32_t *first, const model_config *c, const family *f, weights *w,
                            uint32_t layer, uint32_t e, int which, kvb_error *err)
{
    static const char *const stacks[] = {"ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"};
    uint32_t rows = rows_of(c, which), columns = columns_of(c, which);
    if (layout_of(f, w) == EXPERTS_STACKED) {
        *first = e * rows;
        return find_stack(out, c, w, layer, stacks[which], rows, columns, err);
    }
    char full[128];
    *first = 0;
    snprintf(full, sizeof full, "model.layers.%u.%s.%u.%s", layer, f->expert_names[MATRICES], e,
             f->expert_names[which]);
    return tensor_find(out, w, full, rows, columns, err);
}

// ---- gpt-oss ----

// Gate and up in turn, and down: as numbers, [D, 2 F] and [F, D] for each expert, or as blocks of MXFP4 with their
// scales apart, rows as they are multiplied, [2 F] and [D].
typedef struct oss_tensors {
    weight_tensor matrix[2], blocks[2], scales[2], bias[2];
    bool is_blocks;
} oss_tensors;

static kvb_status find_bytes(weight_tensor *out, const model_config *c, weights *w, uint32_t layer, const char *name,
                             uint64_t rows, uint32_t columns, kvb_error *err)
{
    char full[128];
    layer_name(full, w, layer, name);
    if (!weights_find(w, full, out) || strcmp(out->type_name, "U8") != 0 || out->rows != c->n_experts * rows ||
        out->columns != columns)
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s: expected %llu rows of %u bytes (U8)", weights_name(w), full,
                        (unsigned long long)(c->n_experts * rows), columns);
    return KVB_OK;
}

static kvb_status find_oss(oss_tensors *t, const model_config *c, weights *w, uint32_t layer, kvb_error *err)
{
    static const char *const names[2] = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"};
    uint64_t F = c->expert_width, D = c->width, rows[2] = {2 * F, D}, terms[2] = {D, F};
    kvb_status status = KVB_OK;
    char name[96], full[128];
    snprintf(name, sizeof name, "%s_blocks", names[0]);
    layer_name(full, w, layer, name);
    t->is_blocks = weights_find(w, full, &t->blocks[0]);
    if (t->is_blocks && (F % MX_VALUES || D % MX_VALUES))
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s: experts of %llu x %llu, expected multiples of %d",
                        weights_name(w), full, (unsigned long long)F, (unsigned long long)D, MX_VALUES);
    for (int i = 0; status == KVB_OK && i < 2; i++) {
        snprintf(name, sizeof name, "%s_bias", names[i]);
        status = find_stack(&t->bias[i], c, w, layer, name, 1, rows[i], err);
        if (status == KVB_OK && !t->is_blocks)
            status = find_stack(&t->matrix[i], c, w, layer, names[i], terms[i], rows[i], err);
        if (status != KVB_OK || !t->is_blocks) continue;
        snprintf(name, sizeof name, "%s_blocks", names[i]);
        status = find_bytes(&t->blocks[i], c, w, layer, name, rows[i] * (terms[i] / MX_VALUES), MX_BYTES, err);
        snprintf(name, sizeof name, "%s_scales", names[i]);
        if (status == KVB_OK)
            status = find_bytes(&t->scales[i], c, w, layer, name, rows[i], (uint32_t)(terms[i] / MX_VALUES), err);
    }
    return status;
}

// Row `row` of expert e as GGUF's blocks of MXFP4: a scale, then two halves of 16 values in the low and high bits. Here
// low and high bits are neighbours.
static void oss_block_row(const oss_tensors *t, int i, size_t row, size_t terms, unsigned char *to)
{
    size_t n = terms / MX_VALUES;
    const unsigned char *from = t->blocks[i].data + row * n * MX_BYTES, *scales = t->scales[i].data + row * n;
    for (size_t b = 0; b < n; b++, from += MX_BYTES, to += 1 + MX_BYTES) {
        unsigned char values[MX_VALUES];
        for (int k = 0; k < MX_BYTES; k++) values[2 * k] = from[k] & 15, values[2 * k + 1] = from[k] >> 4;
        to[0] = scales[b];
        for (int k = 0; k < MX_BYTES; k++) to[1 + k] = (unsigned char)(values[k] | values[k + MX_BYTES] << 4);
    }
}

// All of expert e's [terms, rows] in float32.
static kvb_status oss_values(float *to, const weight_tensor *t, size_t e, size_t terms, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t k = 0; status == KVB_OK && k < terms; k++)
        status = dequant_rows(t->type, t->data + (e * terms + k) * t->row_bytes, t->columns, to + k * t->columns, err);
    return status;
}

static kvb_status load_oss(dev_matrix *out, const model *m, uint32_t layer, const oss_tensors *t, uint32_t e, int which,
                           kvb_error *err)
{
    const model_config *c = &m->config;
    size_t rows = rows_of(c, which), terms = columns_of(c, which), step = which == DOWN ? 1 : 2;
    int i = which == DOWN;
    size_t all = i ? rows : 2 * rows, row_bytes = terms / MX_VALUES * (1 + MX_BYTES);
    float *values = t->is_blocks ? NULL : need_more(NULL, 2 * terms * all, sizeof *values, "values of an expert");
    unsigned char *blocks = t->is_blocks ? need_more(NULL, rows, row_bytes, "rows of an expert") : NULL;
    kvb_status status = KVB_OK;
    if (values) status = oss_values(values, &t->matrix[i], e, terms, err);
    stored_matrix stored = {.type = GGUF_TENSOR_MXFP4, .data = blocks, .out = (uint32_t)rows, .in = (uint32_t)terms};
    for (size_t r = 0; status == KVB_OK && r < rows; r++) {
        size_t from = step * r + (which == UP);
        if (blocks) oss_block_row(t, i, e * all + from, terms, blocks + r * row_bytes);
        for (size_t k = 0; values && k < terms; k++) values[terms * all + r * terms + k] = values[k * all + from];
    }
    if (values) stored = stored_floats(values + terms * all, (uint32_t)rows, (uint32_t)terms);
    unsigned hold = model_hold(m, layer + 1, false) & ~(unsigned)(HOLD_MAPPED | HOLD_IN_PLACE); // these are copies
    if (status == KVB_OK) *out = m->device->b->matrix_load(m->device, &stored, hold);
    free(values);
    free(blocks);
    return status;
}

// ---- Biases ----

static kvb_status find_biases(weight_tensor out[MATRICES], const model_config *c, const family *f, weights *w,
                              uint32_t layer, kvb_error *err)
{
    static const char *const stacks[] = {"ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"};
    kvb_status status = KVB_OK;
    if (layout_of(f, w) != EXPERTS_STACKED) return KVB_OK; // oss_tensors has them
    for (int i = 0; status == KVB_OK && i < MATRICES; i++)
        status = find_stack(&out[i], c, w, layer, stacks[i], 1, rows_of(c, i), err);
    return status;
}

static kvb_status bias_row(float *to, const weight_tensor *t, uint32_t e, kvb_error *err)
{
    return dequant_rows(t->type, t->data + e * t->row_bytes, t->columns, to, err);
}

static kvb_status load_biases(model_layer *to, const model *m, const family *f, weights *w, uint32_t layer,
                              const oss_tensors *oss, kvb_error *err)
{
    const model_config *c = &m->config;
    weight_tensor stacks[MATRICES];
    size_t F = c->expert_width, each = 2 * F + c->width;
    float *values = need_more(NULL, c->n_experts * each + 2 * F, sizeof *values, "biases of experts");
    float *pairs = values + c->n_experts * each;
    kvb_status status = find_biases(stacks, c, f, w, layer, err);
    for (uint32_t e = 0; status == KVB_OK && e < c->n_experts; e++) {
        float *at = values + e * each;
        if (layout_of(f, w) == EXPERTS_STACKED) {
            for (int i = 0; status == KVB_OK && i < MATRICES; i++)
                status = bias_row(at + (size_t)i * F, &stacks[i], e, err);
            continue;
        }
        status = bias_row(pairs, &oss->bias[0], e, err);
        for (size_t k = 0; k < F; k++) at[k] = pairs[2 * k], at[F + k] = pairs[2 * k + 1];
        if (status == KVB_OK) status = bias_row(at + 2 * F, &oss->bias[1], e, err);
    }
    if (status == KVB_OK) {
        to->expert_bias = m->device->b->alloc(m->device, c->n_experts * each);
        if (!to->expert_bias.address)
            status = kvb_fail(err, KVB_MEMORY, "no memory for the biases of %u experts", c->n_experts);
        else m->device->b->upload(m->device, to->expert_bias, values, c->n_experts * each);
    }
    free(values);
    return status;
}

// ---- All experts ----

// What the experts of a layer take, all of the same types. gpt-oss's stand in folders in another order than they are
// multiplied in.
static void count_experts(model *m, uint32_t layer, const uint32_t types[MATRICES], bool maps)
{
    const model_config *c = &m->config;
    for (uint32_t e = 0; e < c->n_experts; e++)
        for (int i = 0; i < MATRICES; i++) {
            const stored_matrix one = {.type = types[i], .out = rows_of(c, i), .in = columns_of(c, i)};
            model_count_matrix(m, layer + 1, &one, false, maps);
        }
}

static kvb_status experts_claim(model *m, weights *w, uint32_t layer, kvb_error *err)
{
    const model_config *c = &m->config;
    const family *f = m->family;
    weight_tensor t, biases[MATRICES];
    oss_tensors oss;
    uint32_t first, plain = weights_layer_type(w), types[MATRICES] = {plain, plain, plain};
    bool transposed = layout_of(f, w) == EXPERTS_TRANSPOSED;
    kvb_status status = KVB_OK;
    if (transposed) {
        oss.is_blocks = weights_experts_are_mxfp4(w);
        if (weights_has_tensors(w)) status = find_oss(&oss, c, w, layer, err);
        for (int i = 0; i < MATRICES; i++) types[i] = oss.is_blocks ? GGUF_TENSOR_MXFP4 : GGUF_TENSOR_F32;
    } else if (weights_has_tensors(w)) {
        if (c->switches & EXPERT_BIAS) status = find_biases(biases, c, f, w, layer, err);
        for (uint32_t e = 0; e < c->n_experts; e++)
            for (int i = 0; status == KVB_OK && i < MATRICES; i++) {
                status = find_rows(&t, &first, c, f, w, layer, e, i, err);
                types[i] = t.type;
            }
    }
    if (status == KVB_OK) count_experts(m, layer, types, !transposed);
    return status;
}

static kvb_status experts_load(model_layer *to, const model *m, weights *w, uint32_t layer, kvb_error *err)
{
    const model_config *c = &m->config;
    const family *f = m->family;
    backend_device *on = m->device;
    oss_tensors oss = {.is_blocks = false};
    bool transposed = layout_of(f, w) == EXPERTS_TRANSPOSED;
    kvb_status status = transposed ? find_oss(&oss, c, w, layer, err) : KVB_OK;
    to->experts = need(MATRICES * (size_t)c->n_experts, sizeof *to->experts, "matrices of experts");
    for (uint32_t i = 0; status == KVB_OK && i < MATRICES * c->n_experts; i++) {
        dev_matrix *one = &to->experts[i];
        weight_tensor t;
        uint32_t first = 0;
        if (transposed) status = load_oss(one, m, layer, &oss, i / MATRICES, (int)(i % MATRICES), err);
        else status = find_rows(&t, &first, c, f, w, layer, i / MATRICES, (int)(i % MATRICES), err);
        if (status == KVB_OK && !transposed) {
            const stored_matrix rows = tensor_rows(&t, first, rows_of(c, (int)(i % MATRICES)));
            *one = on->b->matrix_load(on, &rows, model_hold(m, layer + 1, false));
        }
        if (status == KVB_OK && !one->address && !one->packed)
            status =
                kvb_fail(err, KVB_NUMERIC, "%s: expert %u of layer %u: a value is not finite, or there is no memory",
                         weights_name(w), i / MATRICES, layer);
    }
    if (status == KVB_OK && c->switches & EXPERT_BIAS) status = load_biases(to, m, f, w, layer, &oss, err);
    return status;
}

static void experts_free(model_layer *l, const model *m)
{
    backend_device *on = m->device;
    for (uint32_t i = 0; l->experts && i < MATRICES * m->config.n_experts; i++)
        on->b->matrix_release(on, &l->experts[i]);
    free(l->experts);
    on->b->release(on, l->expert_bias);
}

// ---- Claiming ----

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
    m->rooms = need(c->n_layers + 1, sizeof *m->rooms, "groups of weights");
    m->n_held = c->n_layers + 1;
    kvb_status status = claim_ends(m, w, err);
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
    oracle_value_root(in->roots, in->values, wo->rows, c->n_heads, c->head_dim);
    return upload(&to->value_root, in, in->roots, (size_t)wo->columns * c->head_dim, "value norms", err);
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
    in.values = need_more(NULL, floats, sizeof *in.values, "values of a tensor");
    in.roots = need_more(NULL, queries * c->head_dim, sizeof *in.roots, "value norms");
    m->layers = need(c->n_layers, sizeof *m->layers, "layers");
    entries_matrices(matrices, c);
    entries_vectors(vectors, c);
    kvb_status status = load_ends(&in, err);
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
