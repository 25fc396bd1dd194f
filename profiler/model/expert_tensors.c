#include "profiler/model/expert_tensors.h"
#include "profiler/model/model_tensors.h"
#include "profiler/model/tensor_entries.h"
#include "profiler/weights/dequant.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    float *values = t->is_blocks ? NULL : malloc(2 * terms * all * sizeof *values);
    unsigned char *blocks = t->is_blocks ? malloc(rows * row_bytes) : NULL;
    kvb_status status =
        values || blocks ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for an expert of %zu rows", rows);
    if (status == KVB_OK && values) status = oss_values(values, &t->matrix[i], e, terms, err);
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
    float *values = malloc((c->n_experts * each + 2 * F) * sizeof *values), *pairs = values + c->n_experts * each;
    kvb_status status = values ? find_biases(stacks, c, f, w, layer, err)
                               : kvb_fail(err, KVB_MEMORY, "no memory for the biases of %u experts", c->n_experts);
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

// ---- All ----

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

kvb_status experts_claim(model *m, weights *w, uint32_t layer, kvb_error *err)
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
    m->expert_type = types[0];
    if (status == KVB_OK) count_experts(m, layer, types, !transposed);
    return status;
}

kvb_status experts_load(model_layer *to, const model *m, weights *w, uint32_t layer, kvb_error *err)
{
    const model_config *c = &m->config;
    const family *f = m->family;
    backend_device *on = m->device;
    oss_tensors oss = {.is_blocks = false};
    bool transposed = layout_of(f, w) == EXPERTS_TRANSPOSED;
    kvb_status status = transposed ? find_oss(&oss, c, w, layer, err) : KVB_OK;
    to->experts = calloc(MATRICES * (size_t)c->n_experts, sizeof *to->experts);
    if (status == KVB_OK && !to->experts)
        status = kvb_fail(err, KVB_MEMORY, "%s: no memory for %u experts", weights_name(w), c->n_experts);
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

void experts_free(model_layer *l, const model *m)
{
    backend_device *on = m->device;
    for (uint32_t i = 0; l->experts && i < MATRICES * m->config.n_experts; i++)
        on->b->matrix_release(on, &l->experts[i]);
    free(l->experts);
    on->b->release(on, l->expert_bias);
}
