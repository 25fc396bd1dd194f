// The tensors of a model: tensor_list.h with the model's own sizes; a walk that finds which of them it has and how much
// memory they take; and loading them.
#include "profiler/model/model_tensors.h"
#include "formats/need.h"
#include "profiler/model/oracle.h"
#include "profiler/weights/dequant.h"
#include "profiler/weights/first_error.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT_TENSOR(...) +1
enum { N_MATRICES = 0 LAYER_MATRICES(COUNT_TENSOR), N_ENTRIES = N_MATRICES LAYER_VECTORS(COUNT_TENSOR) };
#undef COUNT_TENSOR

typedef struct tensor_entry {
    tensor_role role;
    size_t field; // offset in struct model_layer
    uint32_t rows, columns;
    bool there;
    tensor_role fused; // the tensor that has these rows from `first` on; `role` if it has a tensor of its own
    uint32_t first, fused_rows;
} tensor_entry;

#define SIZES(c)                                                                                                  \
    const uint32_t width = (c)->width, ffn = (c)->ffn_width, head = (c)->head_dim, queries = (c)->n_heads * head, \
                   keys = (c)->n_kv_heads * head, heads = (c)->n_heads, kv_heads = (c)->n_kv_heads,               \
                   experts = (c)->n_experts;                                                                      \
    (void)width, (void)ffn, (void)head, (void)queries, (void)keys, (void)heads, (void)kv_heads, (void)experts

static bool has(const model_config *c, unsigned with, unsigned without)
{
    return (c->switches & with) == with && !(c->switches & without);
}

// A line of tensor_list.h as an entry for the config `c`, in the scope of SIZES(c).
#define ENTRY(role, field, gguf, hf, rows, columns, with, without) \
    {TENSOR_##role, offsetof(model_layer, field), rows, columns, has(c, with, without), TENSOR_##role, 0, rows},

// Lists a layer's matrices, then its vectors.
static void list_entries(tensor_entry out[N_ENTRIES], const model_config *c)
{
    SIZES(c);
    const tensor_entry all[N_ENTRIES] = {LAYER_MATRICES(ENTRY) LAYER_VECTORS(ENTRY)};
    memcpy(out, all, sizeof all);
    const struct {
        unsigned with;
        tensor_role fused, part;
        uint32_t first, rows;
    } parts[] = {{FUSED_QKV, TENSOR_WQKV, TENSOR_WQ, 0, queries + 2 * keys},
                 {FUSED_QKV, TENSOR_WQKV, TENSOR_WK, queries, queries + 2 * keys},
                 {FUSED_QKV, TENSOR_WQKV, TENSOR_WV, queries + keys, queries + 2 * keys},
                 {FUSED_GATE_UP, TENSOR_GATE_UP, TENSOR_GATE, 0, 2 * ffn},
                 {FUSED_GATE_UP, TENSOR_GATE_UP, TENSOR_UP, ffn, 2 * ffn}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (int m = 0; m < N_MATRICES; m++)
            if (out[m].role == parts[i].part && has(c, parts[i].with, 0)) {
                out[m].there = true;
                out[m].fused = parts[i].fused;
                out[m].first = parts[i].first;
                out[m].fused_rows = parts[i].rows;
            }
}

// Whether this layer has that tensor. Layers with experts have a router in place of gate, up and down.
static bool entry_in_layer(const tensor_entry *e, const model_config *c, uint32_t layer)
{
    bool router = e->role == TENSOR_ROUTER || e->role == TENSOR_ROUTER_BIAS,
         dense = e->role == TENSOR_GATE || e->role == TENSOR_UP || e->role == TENSOR_DOWN;
    bool sparse = layer_set_has(&c->sparse, layer);
    return e->there && !(dense && sparse) && !(router && !sparse);
}

// ---- Finding ----

// A walk over all tensors, with host buffers for what is computed from weights. The first error is kept, and calls
// after it do nothing.
typedef struct tensor_walk {
    model *m;
    weights *w;
    float *values, *roots;
    kvb_error *err;
    kvb_status status;
} tensor_walk;

// Checks shape and type. Errors name file and tensor: KVB_FORMAT (another shape), KVB_UNSUPPORTED (an unreadable type).
static void check_shape(tensor_walk *k, const weight_tensor *t, uint64_t rows, uint64_t columns)
{
    kvb_error inner = {0};
    if (t->rows != rows || t->columns != columns || t->n_dims > 2)
        KEEP_ERROR(k, KVB_FORMAT, "%s: tensor %s has shape [%llu, %llu], expected [%llu, %llu]", t->file, t->name,
                   (unsigned long long)t->rows, (unsigned long long)t->columns, (unsigned long long)rows,
                   (unsigned long long)columns);
    else if (dequant_rows(t->type, t->data, 0, NULL, &inner) != KVB_OK)
        KEEP_ERROR(k, inner.status, "%s: tensor %s: type %s cannot be read", t->file, t->name, t->type_name);
}

static void find_tensor(tensor_walk *k, weight_tensor *out, const char *name, uint64_t rows, uint64_t columns)
{
    if (k->status != KVB_OK) return;
    if (weights_find(k->w, name, out)) check_shape(k, out, rows, columns);
    else
        KEEP_ERROR(k, KVB_FORMAT, "%s: tensor %s is missing, expected [%llu, %llu]", k->w->name, name,
                   (unsigned long long)rows, (unsigned long long)columns);
}

static void find_entry(tensor_walk *k, weight_tensor *out, const tensor_entry *e, uint32_t layer)
{
    char name[128];
    family_tensor_name(k->m->family, e->fused, k->w->is_gguf, layer, name);
    find_tensor(k, out, name, e->fused_rows, e->columns);
}

static void find_norm(tensor_walk *k, weight_tensor *out)
{
    find_tensor(k, out, k->w->is_gguf ? "output_norm.weight" : "model.norm.weight", 1, k->m->config.width);
}

static void find_embedding(tensor_walk *k, weight_tensor *out)
{
    const char *name = k->w->is_gguf ? "token_embd.weight" : "model.embed_tokens.weight";
    find_tensor(k, out, name, k->m->config.vocabulary, k->m->config.width);
}

// Finds the output matrix. Returns true if the embedding takes its place (for a config without weights: would take).
static bool find_head(tensor_walk *k, weight_tensor *out)
{
    const model_config *c = &k->m->config;
    const char *name = k->w->is_gguf ? "output.weight" : "lm_head.weight";
    double says_tied = -1;
    bool said = false;
    if (k->status == KVB_OK) k->status = weights_number(k->w, WEIGHT_TIED, &says_tied, &said, k->err);
    if (k->status != KVB_OK) return false;
    if (k->w->n_names == 0) return said ? says_tied != 0 : k->m->family->ties;
    bool tied = !weights_find(k->w, name, out) || (said && says_tied != 0);
    if (!tied) check_shape(k, out, c->vocabulary, c->width);
    else if (said && says_tied == 0)
        KEEP_ERROR(k, KVB_FORMAT, "%s: tensor %s is missing, expected [%u, %u]", k->w->name, name, c->vocabulary,
                   c->width);
    return tied;
}

// Returns rows first .. first+rows-1 of a tensor that was found.
static stored_matrix rows_of_tensor(const weight_tensor *t, uint32_t first, uint32_t rows)
{
    return (stored_matrix){
        .type = t->type, .data = t->data + first * t->row_bytes, .out = rows, .in = (uint32_t)t->columns};
}

// ---- What a matrix takes ----

// Returns how the matrices of a group are loaded, as matrix_hold. `rows`: their rows must be readable.
static unsigned model_hold(const model *m, uint32_t group, bool rows)
{
    return HOLD_MAPPED | (rows ? HOLD_ROWS : 0) | (group >= m->n_held ? HOLD_IN_PLACE : 0);
}

// Returns how the embedding is held. If another matrix makes the logits, only single rows of it are read, so it stays
// in the file.
static unsigned hold_embedding(const model *m, bool tied)
{
    return model_hold(m, 0, true) | (tied ? 0 : HOLD_IN_PLACE);
}

// Adds a matrix of a group to m->rooms; w->data is not read. `maps`: the file stores it as it is multiplied, so that
// it may be read there.
static void count_matrix(model *m, uint32_t group, const stored_matrix *w, bool rows, bool maps)
{
    const backend *b = m->device->b;
    weight_room *to = &m->rooms[group];
    uint32_t values = 1, bytes = 0;
    unsigned own = model_hold(m, group, rows) & ~(unsigned)HOLD_IN_PLACE;
    uint64_t held = b->matrix_bytes(m->device, w, own);
    gguf_tensor_type_block(w->type, &values, &bytes);
    to->held += held;
    to->in_place += maps ? b->matrix_bytes(m->device, w, own | HOLD_IN_PLACE) : held;
    to->file += maps ? (uint64_t)w->out * w->in / values * bytes : 0;
    m->most_terms = w->in > m->most_terms ? w->in : m->most_terms;
    m->has_made = m->has_made || w->type == GGUF_TENSOR_BF16 || stored_bits(w);
}

// ---- Experts, which each container keeps in its own way (expert_layout of family.h) ----

enum { GATE, UP, DOWN, MATRICES, MX_VALUES = 32, MX_BYTES = 16 };

static uint32_t rows_of(const model_config *c, int which)
{
    return which == DOWN ? c->width : c->expert_width;
}

static uint32_t columns_of(const model_config *c, int which)
{
    return which == DOWN ? c->expert_width : c->width;
}

static expert_layout layout_of(const tensor_walk *k)
{
    return k->w->is_gguf ? EXPERTS_STACKED : k->m->family->experts;
}

static void layer_name(char out[128], const weights *w, uint32_t layer, const char *name)
{
    snprintf(out, 128, w->is_gguf ? "blk.%u.%s" : "model.layers.%u.%s", layer, name);
}

// Finds a tensor whose first dimension counts experts: the others are [rows, columns].
static void find_stack(tensor_walk *k, weight_tensor *out, uint32_t layer, const char *name, uint64_t rows,
                       uint64_t columns)
{
    uint32_t n = k->m->config.n_experts;
    char full[128];
    layer_name(full, k->w, layer, name);
    if (k->status != KVB_OK) return;
    if (!weights_find(k->w, full, out)) {
        KEEP_ERROR(k, KVB_FORMAT, "%s: tensor %s is missing, expected [%u, %llu, %llu]", k->w->name, full, n,
                   (unsigned long long)rows, (unsigned long long)columns);
        return;
    }
    weight_tensor flat = *out;
    flat.n_dims = 2;
    check_shape(k, &flat, n * rows, columns);
}

// Finds the tensor that has matrix `which` of expert e, alone or (EXPERTS_STACKED) with all others. Returns its first
// row there.
static uint32_t find_rows(tensor_walk *k, weight_tensor *out, uint32_t layer, uint32_t e, int which)
{
    static const char *const stacks[] = {"ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"};
    uint32_t rows = rows_of(&k->m->config, which), columns = columns_of(&k->m->config, which);
    if (layout_of(k) == EXPERTS_STACKED) {
        find_stack(k, out, layer, stacks[which], rows, columns);
        return e * rows;
    }
    const char *const *names = k->m->family->expert_names;
    char full[128];
    snprintf(full, sizeof full, "model.layers.%u.%s.%u.%s", layer, names[MATRICES], e, names[which]);
    find_tensor(k, out, full, rows, columns);
    return 0;
}

// ---- gpt-oss ----

// [0] gate and up, alternating, [1] down. They are numbers, [D, 2 F] and [F, D] for each expert; or blocks of MXFP4
// with separate scales, 2 F and D rows, as they are multiplied.
typedef struct oss_tensors {
    weight_tensor matrix[2], blocks[2], scales[2], bias[2];
    bool is_blocks;
} oss_tensors;

static void find_bytes(tensor_walk *k, weight_tensor *out, uint32_t layer, const char *name, uint64_t rows,
                       uint64_t columns)
{
    char full[128];
    layer_name(full, k->w, layer, name);
    rows *= k->m->config.n_experts;
    if (!weights_find(k->w, full, out) || strcmp(out->type_name, "U8") != 0 || out->rows != rows ||
        out->columns != columns)
        KEEP_ERROR(k, KVB_FORMAT, "%s: tensor %s: expected %llu rows of %llu bytes (U8)", k->w->name, full,
                   (unsigned long long)rows, (unsigned long long)columns);
}

static void find_oss(tensor_walk *k, oss_tensors *t, uint32_t layer)
{
    static const char *const names[2][4] = {{"mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias",
                                             "mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales"},
                                            {"mlp.experts.down_proj", "mlp.experts.down_proj_bias",
                                             "mlp.experts.down_proj_blocks", "mlp.experts.down_proj_scales"}};
    uint64_t F = k->m->config.expert_width, D = k->m->config.width, rows[2] = {2 * F, D}, terms[2] = {D, F};
    char full[128];
    layer_name(full, k->w, layer, names[0][2]);
    t->is_blocks = weights_find(k->w, full, &t->blocks[0]);
    if (t->is_blocks && (F % MX_VALUES || D % MX_VALUES))
        KEEP_ERROR(k, KVB_FORMAT, "%s: tensor %s: experts of %llu x %llu, expected multiples of %d", k->w->name, full,
                   (unsigned long long)F, (unsigned long long)D, MX_VALUES);
    for (int i = 0; i < 2; i++) {
        find_stack(k, &t->bias[i], layer, names[i][1], 1, rows[i]);
        if (!t->is_blocks) {
            find_stack(k, &t->matrix[i], layer, names[i][0], terms[i], rows[i]);
            continue;
        }
        find_bytes(k, &t->blocks[i], layer, names[i][2], rows[i] * (terms[i] / MX_VALUES), MX_BYTES);
        find_bytes(k, &t->scales[i], layer, names[i][3], rows[i], terms[i] / MX_VALUES);
    }
}

// Writes row `row`, counted over all experts, as GGUF's blocks of MXFP4: a scale, then two halves of 16 values in the
// low and high bits. In the source, low and high bits are neighbouring values.
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

// Reads rows first .. first+n-1 of a tensor as float32.
static void widen_rows(tensor_walk *k, float *to, const weight_tensor *t, size_t first, size_t n)
{
    for (size_t i = 0; k->status == KVB_OK && i < n; i++)
        k->status =
            dequant_rows(t->type, t->data + (first + i) * t->row_bytes, t->columns, to + i * t->columns, k->err);
}

static void load_oss(tensor_walk *k, dev_matrix *out, uint32_t layer, const oss_tensors *t, uint32_t e, int which)
{
    const model *m = k->m;
    size_t rows = rows_of(&m->config, which), terms = columns_of(&m->config, which), step = which == DOWN ? 1 : 2;
    int i = which == DOWN;
    size_t all = i ? rows : 2 * rows, row_bytes = terms / MX_VALUES * (1 + MX_BYTES);
    float *values = t->is_blocks ? NULL : need_more(NULL, 2 * terms * all, sizeof *values, "values of an expert");
    unsigned char *blocks = t->is_blocks ? need_more(NULL, rows, row_bytes, "rows of an expert") : NULL;
    if (values) widen_rows(k, values, &t->matrix[i], e * terms, terms);
    stored_matrix stored = {.type = GGUF_TENSOR_MXFP4, .data = blocks, .out = (uint32_t)rows, .in = (uint32_t)terms};
    for (size_t r = 0; k->status == KVB_OK && r < rows; r++) {
        size_t from = step * r + (which == UP);
        if (blocks) oss_block_row(t, i, e * all + from, terms, blocks + r * row_bytes);
        for (size_t j = 0; values && j < terms; j++) values[terms * all + r * terms + j] = values[j * all + from];
    }
    if (values) stored = stored_floats(values + terms * all, (uint32_t)rows, (uint32_t)terms);
    unsigned hold = model_hold(m, layer + 1, false) & ~(unsigned)(HOLD_MAPPED | HOLD_IN_PLACE); // these are copies
    if (k->status == KVB_OK) *out = m->device->b->matrix_load(m->device, &stored, hold);
    free_all(values, blocks);
}

// ---- Biases ----

// Finds the biases of stacked experts; those of gpt-oss's folders are in oss_tensors.
static void find_biases(tensor_walk *k, weight_tensor out[MATRICES], uint32_t layer)
{
    static const char *const stacks[] = {"ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"};
    for (int i = 0; layout_of(k) == EXPERTS_STACKED && i < MATRICES; i++)
        find_stack(k, &out[i], layer, stacks[i], 1, rows_of(&k->m->config, i));
}

static void load_biases(tensor_walk *k, model_layer *to, uint32_t layer, const oss_tensors *oss)
{
    const model_config *c = &k->m->config;
    const backend *b = k->m->device->b;
    weight_tensor stacks[MATRICES];
    size_t F = c->expert_width, each = 2 * F + c->width;
    float *values = need_more(NULL, c->n_experts * each + 2 * F, sizeof *values, "biases of experts");
    float *pairs = values + c->n_experts * each;
    bool stacked = layout_of(k) == EXPERTS_STACKED;
    find_biases(k, stacks, layer);
    for (uint32_t e = 0; k->status == KVB_OK && e < c->n_experts; e++) {
        float *at = values + e * each;
        for (int i = 0; stacked && i < MATRICES; i++) widen_rows(k, at + (size_t)i * F, &stacks[i], e, 1);
        if (stacked) continue;
        widen_rows(k, pairs, &oss->bias[0], e, 1);
        for (size_t i = 0; i < F; i++) at[i] = pairs[2 * i], at[F + i] = pairs[2 * i + 1];
        widen_rows(k, at + 2 * F, &oss->bias[1], e, 1);
    }
    if (k->status == KVB_OK) to->expert_bias = b->alloc(k->m->device, c->n_experts * each);
    if (to->expert_bias.address) b->upload(k->m->device, to->expert_bias, values, c->n_experts * each);
    else KEEP_ERROR(k, KVB_MEMORY, "no memory for the biases of %u experts", c->n_experts);
    free(values);
}

// ---- All experts ----

// Counts the memory of a layer's experts, which are all of the same types. `maps` is false for gpt-oss's folders, which
// store experts in another order than products need.
static void count_experts(model *m, uint32_t layer, const uint32_t types[MATRICES], bool maps)
{
    const model_config *c = &m->config;
    for (uint32_t e = 0; e < c->n_experts; e++)
        for (int i = 0; i < MATRICES; i++) {
            const stored_matrix one = {.type = types[i], .out = rows_of(c, i), .in = columns_of(c, i)};
            count_matrix(m, layer + 1, &one, false, maps);
        }
}

static void claim_experts(tensor_walk *k, uint32_t layer)
{
    const model_config *c = &k->m->config;
    weight_tensor t, biases[MATRICES];
    oss_tensors oss;
    uint32_t plain = weights_default_type(k->w), types[MATRICES] = {plain, plain, plain};
    bool transposed = layout_of(k) == EXPERTS_TRANSPOSED, has = k->w->n_names > 0;
    if (transposed) {
        oss.is_blocks = k->w->is_mxfp4;
        if (has) find_oss(k, &oss, layer);
        for (int i = 0; i < MATRICES; i++) types[i] = oss.is_blocks ? GGUF_TENSOR_MXFP4 : GGUF_TENSOR_F32;
    } else if (has) {
        if (c->switches & EXPERT_BIAS) find_biases(k, biases, layer);
        for (uint32_t i = 0; k->status == KVB_OK && i < MATRICES * c->n_experts; i++) {
            find_rows(k, &t, layer, i / MATRICES, (int)(i % MATRICES));
            types[i % MATRICES] = t.type;
        }
    }
    if (k->status == KVB_OK) count_experts(k->m, layer, types, !transposed);
}

static void load_experts(tensor_walk *k, model_layer *to, uint32_t layer)
{
    const model_config *c = &k->m->config;
    backend_device *on = k->m->device;
    oss_tensors oss = {.is_blocks = false};
    bool transposed = layout_of(k) == EXPERTS_TRANSPOSED;
    if (transposed) find_oss(k, &oss, layer);
    to->experts = need(MATRICES * (size_t)c->n_experts, sizeof *to->experts, "matrices of experts");
    for (uint32_t i = 0; k->status == KVB_OK && i < MATRICES * c->n_experts; i++) {
        dev_matrix *one = &to->experts[i];
        int which = (int)(i % MATRICES);
        weight_tensor t = {.n_dims = 0};
        if (transposed) {
            load_oss(k, one, layer, &oss, i / MATRICES, which);
        } else {
            uint32_t first = find_rows(k, &t, layer, i / MATRICES, which);
            const stored_matrix rows = rows_of_tensor(&t, first, rows_of(c, which));
            if (k->status == KVB_OK) *one = on->b->matrix_load(on, &rows, model_hold(k->m, layer + 1, false));
        }
        if (!one->address && !one->packed)
            KEEP_ERROR(k, KVB_NUMERIC, "%s: expert %u of layer %u: a value is not finite, or there is no memory",
                       k->w->name, i / MATRICES, layer);
    }
    if (k->status == KVB_OK && c->switches & EXPERT_BIAS) load_biases(k, to, layer, &oss);
}

// ---- Claiming ----

// Claims and counts a layer's matrices, vectors and experts, and what the oracle keeps of them.
static void claim_layer(tensor_walk *k, uint32_t layer)
{
    model *m = k->m;
    const model_config *c = &m->config;
    tensor_entry entries[N_ENTRIES];
    weight_tensor t;
    bool has = k->w->n_names > 0;
    uint64_t floats = (uint64_t)c->n_heads * c->head_dim * c->head_dim; // value_root
    list_entries(entries, c);
    for (int i = 0; k->status == KVB_OK && i < N_ENTRIES; i++) {
        const tensor_entry *e = &entries[i];
        if (!entry_in_layer(e, c, layer)) continue;
        t.type = weights_default_type(k->w);
        if (has) find_entry(k, &t, e, layer);
        const stored_matrix stored = {.type = t.type, .out = e->rows, .in = e->columns};
        if (i >= N_MATRICES) floats += (uint64_t)e->rows * e->columns;
        else if (k->status == KVB_OK) count_matrix(m, layer + 1, &stored, e->role == TENSOR_WO, true);
    }
    m->rooms[layer + 1].held += floats * sizeof(float);
    m->rooms[layer + 1].in_place += floats * sizeof(float);
    if (k->status == KVB_OK && layer_set_has(&c->sparse, layer)) claim_experts(k, layer);
}

static void claim_ends(tensor_walk *k)
{
    model *m = k->m;
    weight_tensor t = {.type = weights_default_type(k->w)}, head = t, norm;
    bool has = k->w->n_names > 0, tied = find_head(k, &head);
    if (has) find_embedding(k, &t);
    if (has) find_norm(k, &norm);
    if (k->status != KVB_OK) return;
    stored_matrix stored = {.type = t.type, .out = m->config.vocabulary, .in = m->config.width};
    if (!tied) {
        uint64_t rows = m->device->b->matrix_bytes(m->device, &stored, hold_embedding(m, false));
        m->rooms[0] = (weight_room){rows, rows, 0};
        stored.type = head.type;
    }
    count_matrix(m, 0, &stored, tied, true);
}

kvb_status model_claim_tensors(model *m, weights *w, kvb_error *err)
{
    const model_config *c = &m->config;
    tensor_walk k = {.m = m, .w = w, .err = err};
    m->rooms = need(c->n_layers + 1, sizeof *m->rooms, "groups of weights");
    m->n_held = c->n_layers + 1;
    claim_ends(&k);
    for (uint32_t layer = 0; k.status == KVB_OK && layer < c->n_layers; layer++) claim_layer(&k, layer);
    const char *left = k.status == KVB_OK ? weights_unclaimed(w) : NULL;
    if (left)
        KEEP_ERROR(&k, KVB_UNSUPPORTED,
                   "%s: tensor '%.100s' is not part of the %s architecture with %u layers; leaving it out would change "
                   "the numbers",
                   w->name, left, c->architecture, c->n_layers);
    return k.status;
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
    return m->has_made || m->n_held <= m->config.n_layers ? m->most_terms : 0;
}

uint32_t model_context_rows(const model *m)
{
    enum { ROWS = BACKEND_CHUNK_ROWS - 64 }; // below a chunk, so that a row's bits do not depend on the number of rows
    uint32_t own = m->device->b->context_rows;
    bool many = m->n_held <= m->config.n_layers || m->config.n_experts;
    return many && own < ROWS ? ROWS : own;
}

// ---- Loading ----

// Reads rows first .. first+rows-1 as float32. Fails if a value is not finite.
static void read_rows(tensor_walk *k, float *out, const weight_tensor *t, uint32_t first, uint32_t rows)
{
    if (k->status != KVB_OK) return;
    stored_matrix w = rows_of_tensor(t, first, rows);
    if (stored_rows(&w, 0, rows, out)) return;
    size_t i = 0, n = rows * t->columns;
    while (i + 1 < n && isfinite(out[i])) i++;
    KEEP_ERROR(k, KVB_NUMERIC,
               "%s: tensor %s: value %zu of %zu is not finite; the file is damaged or overflowed when it was made",
               t->file, t->name, first * t->columns + i, (size_t)(t->rows * t->columns));
}

static void load_matrix(tensor_walk *k, dev_matrix *out, const weight_tensor *t, uint32_t first, uint32_t rows,
                        uint32_t paired, unsigned hold)
{
    backend_device *on = k->m->device;
    if (k->status != KVB_OK) return;
    stored_matrix w = rows_of_tensor(t, first, rows);
    w.paired = paired, w.turned = k->m->config.rope_dim;
    *out = on->b->matrix_load(on, &w, hold);
    if (out->address || out->packed) return;
    for (uint32_t r = 0; r < rows; r++) read_rows(k, k->values, t, first + r, 1); // says which value is not finite
    KEEP_ERROR(k, KVB_MEMORY, "%s: no memory for tensor %s on backend %s", t->file, t->name, on->b->name);
}

static void upload(tensor_walk *k, dev *out, const float *values, size_t n, const char *name)
{
    backend_device *on = k->m->device;
    if (k->status != KVB_OK) return;
    *out = on->b->alloc(on, n);
    if (out->address) on->b->upload(on, *out, values, n);
    else KEEP_ERROR(k, KVB_MEMORY, "%s: no memory for %s on backend %s", k->w->name, name, on->b->name);
}

// Returns what has to be added to the container's weights of norms before they can be used as factors.
static float norm_offset(const tensor_walk *k)
{
    return k->m->family->hf_norm_adds_one && !k->w->is_gguf ? 1 : 0;
}

static bool is_norm(tensor_role role)
{
    return role == TENSOR_ATTN_NORM || role == TENSOR_FFN_NORM || role == TENSOR_ATTN_POST || role == TENSOR_FFN_POST ||
           role == TENSOR_Q_NORM || role == TENSOR_K_NORM || role == TENSOR_Q_ROW_NORM || role == TENSOR_K_ROW_NORM ||
           role == TENSOR_Q_HEAD_NORM || role == TENSOR_K_HEAD_NORM;
}

static bool stands_in_pairs(const tensor_walk *k, tensor_role role)
{
    bool pairs = k->w->is_gguf ? k->m->family->gguf_pairs : k->m->family->hf_pairs;
    return pairs &&
           (role == TENSOR_WQ || role == TENSOR_WK || role == TENSOR_Q_BIAS || role == TENSOR_K_BIAS ||
            role == TENSOR_Q_NORM || role == TENSOR_K_NORM || role == TENSOR_Q_HEAD_NORM || role == TENSOR_K_HEAD_NORM);
}

// Reorders the first `turned` values of each head from pairs (2i, 2i+1) to pairs (i, i + turned/2); `head` is scratch.
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

static void load_vector(tensor_walk *k, dev *out, const tensor_entry *e, uint32_t layer)
{
    weight_tensor t;
    uint32_t n = e->rows * e->columns;
    find_entry(k, &t, e, layer);
    read_rows(k, k->values, &t, 0, e->rows);
    for (uint32_t i = 0; is_norm(e->role) && i < n; i++) k->values[i] += norm_offset(k);
    if (stands_in_pairs(k, e->role)) unpair(k->values, n, k->m->config.head_dim, k->m->config.rope_dim, k->values + n);
    upload(k, out, k->values, n, t.name);
}

// Loads a layer's value_root. If what attention adds is normed, its share is diag(w) W_O v up to the norm's scale,
// which is the same for all positions of a step and cancels.
static void load_value_root(tensor_walk *k, model_layer *to, const tensor_entry *wo, const tensor_entry *post,
                            uint32_t layer)
{
    const model_config *c = &k->m->config;
    weight_tensor t;
    float *norm = k->values + (size_t)wo->rows * wo->columns;
    if (post->there) {
        find_entry(k, &t, post, layer);
        read_rows(k, norm, &t, 0, 1);
    }
    find_entry(k, &t, wo, layer);
    read_rows(k, k->values, &t, 0, wo->rows);
    if (k->status != KVB_OK) return;
    for (uint32_t r = 0; post->there && r < wo->rows; r++)
        for (uint32_t i = 0; i < wo->columns; i++) k->values[(size_t)r * wo->columns + i] *= norm[r] + norm_offset(k);
    oracle_value_root(k->roots, k->values, wo->rows, c->n_heads, c->head_dim);
    upload(k, &to->value_root, k->roots, (size_t)wo->columns * c->head_dim, "value norms");
}

static const tensor_entry *entry_of(const tensor_entry *list, tensor_role role)
{
    while (list->role != role) list++;
    return list;
}

static void load_layer(tensor_walk *k, uint32_t layer)
{
    const model_config *c = &k->m->config;
    model_layer *to = &k->m->layers[layer];
    tensor_entry entries[N_ENTRIES];
    weight_tensor t;
    list_entries(entries, c);
    for (int i = 0; i < N_ENTRIES; i++) {
        const tensor_entry *e = &entries[i];
        if (!entry_in_layer(e, c, layer)) continue;
        if (i >= N_MATRICES) {
            load_vector(k, (dev *)((char *)to + e->field), e, layer);
            continue;
        }
        find_entry(k, &t, e, layer);
        load_matrix(k, (dev_matrix *)((char *)to + e->field), &t, e->first, e->rows,
                    stands_in_pairs(k, e->role) ? c->head_dim : 0,
                    model_hold(k->m, layer + 1, e->role == TENSOR_WO)); // CriticalKV asks for W_O's rows
    }
    load_value_root(k, to, entry_of(entries, TENSOR_WO), entry_of(entries, TENSOR_ATTN_POST), layer);
    if (k->status == KVB_OK && layer_set_has(&c->sparse, layer)) load_experts(k, to, layer);
}

// Loads what comes before and after the layers.
static void load_ends(tensor_walk *k)
{
    model *m = k->m;
    const model_config *c = &m->config;
    weight_tensor t, head;
    m->head_is_tied = find_head(k, &head);
    find_embedding(k, &t);
    load_matrix(k, &m->embedding, &t, 0, c->vocabulary, 0, hold_embedding(m, m->head_is_tied));
    if (m->head_is_tied) m->head = m->embedding;
    else load_matrix(k, &m->head, &head, 0, c->vocabulary, 0, model_hold(m, 0, false));
    find_norm(k, &t);
    read_rows(k, k->values, &t, 0, 1);
    for (uint32_t i = 0; i < c->width; i++) k->values[i] += norm_offset(k);
    upload(k, &m->final_norm, k->values, c->width, t.name);
}

kvb_status model_load_tensors(model *m, kvb_error *err)
{
    const model_config *c = &m->config;
    tensor_walk k = {.m = m, .w = m->source, .err = err};
    size_t queries = (size_t)c->n_heads * c->head_dim;
    // W_O and a norm behind it. The rest is enough for every vector with a head behind it, and for every row of a
    // matrix.
    size_t floats = queries * c->width + queries + 2 * (size_t)c->width + c->ffn_width + c->head_dim + c->n_experts;
    k.values = need(floats, sizeof *k.values, "values of a tensor");
    k.roots = need_more(NULL, queries * c->head_dim, sizeof *k.roots, "value norms");
    m->layers = need(c->n_layers, sizeof *m->layers, "layers");
    load_ends(&k);
    for (uint32_t layer = 0; k.status == KVB_OK && layer < c->n_layers; layer++) {
        load_layer(&k, layer);
        weights_forget(k.w);
    }
    free_all(k.values, k.roots);
    return k.status;
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
        for (uint32_t e = 0; l->experts && e < MATRICES * m->config.n_experts; e++)
            on->b->matrix_release(on, &l->experts[e]);
        free(l->experts);
        on->b->release(on, l->expert_bias);
    }
    if (!m->head_is_tied) on->b->matrix_release(on, &m->head);
    on->b->matrix_release(on, &m->embedding);
    on->b->release(on, m->final_norm);
    free(m->layers);
}
