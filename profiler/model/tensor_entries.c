#include "profiler/model/tensor_entries.h"
#include "profiler/weights/dequant.h"
#include "runtime/fail.h"
#include <string.h>

#define SIZES(c)                                                                                                  \
    const uint32_t width = (c)->width, ffn = (c)->ffn_width, head = (c)->head_dim, queries = (c)->n_heads * head, \
                   keys = (c)->n_kv_heads * head, heads = (c)->n_heads, kv_heads = (c)->n_kv_heads,               \
                   experts = (c)->n_experts;                                                                      \
    (void)width, (void)ffn, (void)head, (void)queries, (void)keys, (void)heads, (void)kv_heads, (void)experts

static bool has(const model_config *c, unsigned with, unsigned without)
{
    return (c->switches & with) == with && !(c->switches & without);
}

// A line of tensor_list.h as an entry of the model `c`, between SIZES(c) and its end.
#define ENTRY(role, field, gguf, hf, rows, columns, with, without) \
    {TENSOR_##role, offsetof(model_layer, field), rows, columns, has(c, with, without), TENSOR_##role, 0, rows},

void entries_matrices(tensor_entry out[N_MATRICES], const model_config *c)
{
    SIZES(c);
    const tensor_entry all[N_MATRICES] = {LAYER_MATRICES(ENTRY)};
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

void entries_vectors(tensor_entry out[N_VECTORS], const model_config *c)
{
    SIZES(c);
    const tensor_entry all[N_VECTORS] = {LAYER_VECTORS(ENTRY)};
    memcpy(out, all, sizeof all);
}

bool entry_in_layer(const tensor_entry *e, const model_config *c, uint32_t layer)
{
    bool router = e->role == TENSOR_ROUTER || e->role == TENSOR_ROUTER_BIAS,
         dense = e->role == TENSOR_GATE || e->role == TENSOR_UP || e->role == TENSOR_DOWN;
    bool sparse = layer_set_has(&c->sparse, layer);
    return e->there && !(dense && sparse) && !(router && !sparse);
}

// ---- Finding ----

static kvb_status check_sizes(const weight_tensor *t, uint64_t rows, uint64_t columns, kvb_error *err)
{
    if (t->rows == rows && t->columns == columns && t->n_dims <= 2) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT, "%s: tensor %s has shape [%llu, %llu], expected [%llu, %llu]", t->file, t->name,
                    (unsigned long long)t->rows, (unsigned long long)t->columns, (unsigned long long)rows,
                    (unsigned long long)columns);
}

kvb_status tensor_check_shape(const weight_tensor *t, uint64_t rows, uint64_t columns, kvb_error *err)
{
    kvb_error inner = {0};
    kvb_status status = check_sizes(t, rows, columns, err);
    if (status != KVB_OK) return status;
    status = dequant_rows(t->type, t->data, 0, NULL, &inner);
    if (status != KVB_OK)
        return kvb_fail(err, status, "%s: tensor %s: type %s cannot be read", t->file, t->name, t->type_name);
    return KVB_OK;
}

// The same of a tensor that may be FP8: its scales are in *t then.
static kvb_status check_matrix(weight_tensor *t, weights *w, uint64_t rows, uint64_t columns, kvb_error *err)
{
    if (t->type != STORED_F8_E4M3) return tensor_check_shape(t, rows, columns, err);
    kvb_status status = check_sizes(t, rows, columns, err);
    return status == KVB_OK ? weights_find_scales(w, t, err) : status;
}

stored_matrix tensor_rows(const weight_tensor *t, uint32_t first, uint32_t rows)
{
    stored_matrix w = {.type = t->type,
                       .data = t->data + first * t->row_bytes,
                       .out = rows,
                       .in = (uint32_t)t->columns,
                       .scales = t->scales};
    w.scales.first = first;
    return w;
}

kvb_status tensor_find(weight_tensor *out, weights *w, const char *name, uint64_t rows, uint64_t columns,
                       kvb_error *err)
{
    if (!weights_find(w, name, out))
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s is missing, expected [%llu, %llu]", weights_name(w), name,
                        (unsigned long long)rows, (unsigned long long)columns);
    return check_matrix(out, w, rows, columns, err);
}

kvb_status entry_find(weight_tensor *out, weights *w, const family *f, const tensor_entry *e, uint32_t layer,
                      kvb_error *err)
{
    char name[128];
    family_tensor_name(f, e->fused, weights_is_gguf(w), layer, name);
    return tensor_find(out, w, name, e->fused_rows, e->columns, err);
}

static const char *top_name(const weights *w, const char *gguf, const char *hf)
{
    return weights_is_gguf(w) ? gguf : hf;
}

kvb_status tensor_find_head(weight_tensor *out, bool *tied, const model_config *c, const family *f, weights *w,
                            kvb_error *err)
{
    const char *name = top_name(w, "output.weight", "lm_head.weight");
    double says_tied = -1;
    bool said;
    kvb_status status = weights_number(w, WEIGHT_TIED, &says_tied, &said, err);
    if (status != KVB_OK) return status;
    if (!weights_has_tensors(w)) {
        *tied = said ? says_tied != 0 : f->ties;
        return KVB_OK;
    }
    bool there = weights_find(w, name, out);
    *tied = !there || (said && says_tied != 0);
    if (*tied && said && says_tied == 0)
        return kvb_fail(err, KVB_FORMAT, "%s: tensor %s is missing, expected [%u, %u]", weights_name(w), name,
                        c->vocabulary, c->width);
    return *tied ? KVB_OK : check_matrix(out, w, c->vocabulary, c->width, err);
}

const char *tensor_norm_name(const weights *w)
{
    return top_name(w, "output_norm.weight", "model.norm.weight");
}

const char *tensor_embedding_name(const weights *w)
{
    return top_name(w, "token_embd.weight", "model.embed_tokens.weight");
}
