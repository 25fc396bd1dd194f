#include "evaluator/refitter.h"
#include "formats/need.h"
#include "profiler/backend/meter.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { REFERENCE_SPREAD = 256, REFERENCE_STRIDE = 89 }; // the stride is odd: all positions come in turn

struct refitter {
    const model *m;
    const layer_observer *also;
    uint32_t per_head; // reference queries of one query head
    uint32_t n;        // of a KV head, of the present context: at most per_head * group
    float *queries;    // [L, G, n, d]
    bool *plain;       // [L] attention is a softmax of products alone
    double seconds;
};

refitter *refitter_open(const model *m, uint32_t max_tokens, uint32_t n_queries)
{
    const model_config *c = &m->config;
    uint32_t group = c->n_heads / c->n_kv_heads, each = n_queries / group ? n_queries / group : 1;
    refitter *r = need(1, sizeof *r, "refitting");
    *r = (refitter){.m = m, .per_head = each < max_tokens ? each : max_tokens};
    r->queries = need((size_t)c->n_layers * c->n_heads * r->per_head, c->head_dim * sizeof(float), "reference queries");
    r->plain = need(c->n_layers, sizeof *r->plain, "layers");
    return r;
}

void refitter_close(refitter *r)
{
    if (!r) return;
    free(r->queries);
    free(r->plain);
    free(r);
}

double refitter_seconds(const refitter *r)
{
    return r->seconds;
}

static kvb_status take_queries(void *context, const layer_view *view, kvb_error *err)
{
    refitter *r = context;
    const model_config *c = &r->m->config;
    uint32_t H = view->n_heads, d = view->head_dim, T = view->n_tokens, each = r->per_head < T ? r->per_head : T;
    const rope_size size = {c->rope.attention, c->rope.growth, c->rope.original};
    float scale = (float)view_scale(view), *to = r->queries + (size_t)view->layer * H * each * d;
    r->n = each * (H / view->n_kv_heads);
    r->plain[view->layer] = !view->window && view->softcap == 0 && !view->sinks;
    for (uint32_t h = 0; r->plain[view->layer] && h < H; h++)
        for (uint32_t i = 0; i < each; i++, to += d) {
            uint32_t from = (uint32_t)(((uint64_t)i * 2 + 1) * T / (2 * (uint64_t)each));
            memcpy(to, view->q_raw + ((size_t)from * H + h) * d, d * sizeof *to);
            rope_turn(to, view->rope_frequency, view->rope_dim,
                      T + (h * each + i) * REFERENCE_STRIDE % REFERENCE_SPREAD, size);
            for (uint32_t x = 0; x < d; x++) to[x] *= scale;
        }
    return r->also ? r->also->see(r->also->context, view, err) : KVB_OK;
}

layer_observer refitter_observer(refitter *r, const layer_observer *also)
{
    r->also = also;
    return (layer_observer){take_queries, r, VIEW_Q_RAW | (also ? also->needs : 0), NULL, NULL};
}

// Head h, which has its entries at the front of its room in the cache.
static kvb_status refit_head(const refitter *r, const session *s, const kept_set *kept, uint32_t h, kv_cache *cache,
                             void *work, size_t bytes, kvb_error *err)
{
    uint32_t G = cache->n_kv_heads, d = cache->head_dim;
    size_t context = (size_t)h * s->n_tokens * d;
    kv_span span = kv_cache_span(cache, h / G, h % G);
    kvb_refit_head head = {.n_tokens = s->n_tokens,
                           .head_dim = d,
                           .n_kept = span.count,
                           .n_queries = r->n,
                           .k = s->k + context,
                           .v = s->v + context,
                           .positions = kept->positions + kept->offsets[h],
                           .queries = r->queries + (size_t)h * r->n * d};
    kvb_refit_result done;
    return kvb_refit(&head, work, bytes, span.k, span.v, NULL, &done, err);
}

// Working memory for the largest head that is refitted.
static kvb_status room_for_heads(const refitter *r, const session *s, const kv_cache *cache, size_t *bytes,
                                 kvb_error *err)
{
    kvb_refit_head largest = {s->n_tokens, cache->head_dim, s->n_tokens / 2, r->n, NULL, NULL, NULL, NULL};
    if (largest.n_kept == 0) largest.n_kept = 1;
    return kvb_refit_bytes(&largest, bytes, err);
}

kvb_status refitter_apply(refitter *r, const session *s, const kept_set *kept, kv_cache *cache, kvb_error *err)
{
    uint32_t heads = cache->n_layers * cache->n_kv_heads, limit = s->n_tokens / 2 ? s->n_tokens / 2 : 1;
    size_t bytes = 0, threads = (size_t)omp_get_max_threads();
    double start = meter_now();
    kvb_status status = room_for_heads(r, s, cache, &bytes, err);
    if (status != KVB_OK) return status;
    unsigned char *work = need(threads, bytes, "working memory for refitting");
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t h = 0; h < heads; h++) {
        kvb_error mine = {KVB_OK, ""};
        if (!r->plain[h / cache->n_kv_heads] || cache->counts[h] == 0 || cache->counts[h] > limit) continue;
        kvb_status one = refit_head(r, s, kept, h, cache, work + (size_t)omp_get_thread_num() * bytes, bytes, &mine);
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
