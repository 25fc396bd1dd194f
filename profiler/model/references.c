#include "profiler/model/references.h"
#include "formats/need.h"
#include <stdlib.h>
#include <string.h>

enum { REFERENCE_SPREAD = 256, REFERENCE_STRIDE = 89 }; // the stride is odd: all positions come in turn

references references_open(const model *m, uint32_t max_tokens, uint32_t n_queries)
{
    const model_config *c = &m->config;
    uint32_t group = c->n_heads / c->n_kv_heads, each = n_queries / group ? n_queries / group : 1;
    references r = {.m = m, .per_head = each < max_tokens ? each : max_tokens};
    r.queries = need(references_floats(&r), sizeof(float), "reference queries");
    r.plain = need(c->n_layers, sizeof *r.plain, "layers");
    return r;
}

void references_free(references *r)
{
    free_all(r->queries, r->plain);
    *r = (references){0};
}

size_t references_floats(const references *r)
{
    const model_config *c = &r->m->config;
    return (size_t)c->n_layers * c->n_heads * r->per_head * c->head_dim;
}

// Returns how many one query head has in a context of n_tokens.
static uint32_t queries_each(const references *r, uint32_t n_tokens)
{
    return r->per_head < n_tokens ? r->per_head : n_tokens;
}

void references_see(references *r, const layer_view *view)
{
    const model_config *c = &r->m->config;
    uint32_t H = view->n_heads, d = view->head_dim, T = view->n_tokens, each = queries_each(r, T);
    const rope_size size = {c->rope.attention, c->rope.growth, c->rope.original};
    float scale = (float)view_scale(view), *to = r->queries + (size_t)view->layer * H * each * d;
    r->plain[view->layer] = !view->window && view->softcap == 0 && !view->sinks;
    for (uint32_t h = 0; r->plain[view->layer] && h < H; h++)
        for (uint32_t i = 0; i < each; i++, to += d) {
            uint32_t from = (uint32_t)(((uint64_t)i * 2 + 1) * T / (2 * (uint64_t)each));
            memcpy(to, view->q_raw + ((size_t)from * H + h) * d, d * sizeof *to);
            rope_turn(to, view->rope_frequency, view->rope_dim,
                      T + (h * each + i) * REFERENCE_STRIDE % REFERENCE_SPREAD, size);
            for (uint32_t x = 0; x < d; x++) to[x] *= scale;
        }
}

kvb_refit_head references_head(const references *r, const float *k, const float *v, uint32_t n_tokens, uint32_t layer,
                               uint32_t g)
{
    const model_config *c = &r->m->config;
    uint32_t n = queries_each(r, n_tokens) * (c->n_heads / c->n_kv_heads);
    size_t at = ((size_t)layer * c->n_kv_heads + g) * n * c->head_dim;
    return (kvb_refit_head){
        .n_tokens = n_tokens, .head_dim = c->head_dim, .n_queries = n, .k = k, .v = v, .queries = r->queries + at};
}
