#include "evaluator/refitter.h"
#include "formats/need.h"
#include "profiler/backend/meter.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { REFERENCE_SPREAD = 256, REFERENCE_STRIDE = 89 }; // the stride is odd: all positions come in turn

refitter refitter_open(const model *m, uint32_t max_tokens, uint32_t n_queries)
{
    const model_config *c = &m->config;
    uint32_t group = c->n_heads / c->n_kv_heads, each = n_queries / group ? n_queries / group : 1;
    refitter r = {.m = m, .per_head = each < max_tokens ? each : max_tokens};
    r.queries = need(refitter_floats(&r), sizeof(float), "reference queries");
    r.plain = need(c->n_layers, sizeof *r.plain, "layers");
    return r;
}

void refitter_free(refitter *r)
{
    free_all(r->queries, r->plain);
    *r = (refitter){0};
}

size_t refitter_floats(const refitter *r)
{
    const model_config *c = &r->m->config;
    return (size_t)c->n_layers * c->n_heads * r->per_head * c->head_dim;
}

// Returns the number of reference queries of one query head in a context of n_tokens.
static uint32_t queries_each(const refitter *r, uint32_t n_tokens)
{
    return r->per_head < n_tokens ? r->per_head : n_tokens;
}

void refitter_see(refitter *r, const layer_view *view)
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

// Refits head h of the cache, whose entries are at the front of its room; `head` has what all heads share.
static kvb_status refit_head(const refitter *r, kvb_refit_head head, const float *k, const float *v,
                             const kept_set *kept, uint32_t h, kv_cache *cache, void *work, size_t bytes,
                             kvb_error *err)
{
    uint32_t G = cache->n_kv_heads;
    size_t context = (size_t)h * head.n_tokens * head.head_dim;
    kv_span span = kv_cache_span(cache, h / G, h % G);
    kvb_refit_result done;
    head.n_kept = span.count;
    head.k = k + context;
    head.v = v + context;
    head.positions = kept->positions + kept->offsets[h];
    head.queries = r->queries + (size_t)h * head.n_queries * head.head_dim;
    return kvb_refit(&head, work, bytes, span.k, span.v, NULL, &done, err);
}

kvb_status refitter_apply(refitter *r, const float *k, const float *v, uint32_t n_tokens, const kept_set *kept,
                          kv_cache *cache, kvb_error *err)
{
    uint32_t heads = cache->n_layers * cache->n_kv_heads, limit = n_tokens / 2 ? n_tokens / 2 : 1;
    const kvb_refit_head largest = {.n_tokens = n_tokens,
                                    .head_dim = cache->head_dim,
                                    .n_kept = limit,
                                    .n_queries =
                                        queries_each(r, n_tokens) * (r->m->config.n_heads / cache->n_kv_heads)};
    size_t bytes = 0, threads = (size_t)omp_get_max_threads();
    double start = meter_now();
    kvb_status status = kvb_refit_bytes(&largest, &bytes, err);
    if (status != KVB_OK) return status;
    unsigned char *work = need(threads, bytes, "working memory for refitting");
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t h = 0; h < heads; h++) {
        kvb_error mine = {KVB_OK, ""};
        if (!r->plain[h / cache->n_kv_heads] || cache->counts[h] == 0 || cache->counts[h] > limit) continue;
        kvb_status one =
            refit_head(r, largest, k, v, kept, h, cache, work + (size_t)omp_get_thread_num() * bytes, bytes, &mine);
        if (one == KVB_OK) continue;
#pragma omp critical
        {
            status = one;
            if (err) *err = mine;
        }
    }
    free(work);
    r->seconds += meter_now() - start;
    return status;
}
