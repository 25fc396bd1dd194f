// Refits cut caches (kvb_refit, docs/refit.md) with reference queries of their own context: during the prefill the
// queries of every few positions are taken before RoPE and rotated to positions after the context.
#pragma once
#include "evaluator/cache.h"
#include "profiler/model/forward.h"

enum { REFITTER_PER_HEAD = 256 }; // reference queries of a query head that are usual (docs/refit.md)

typedef struct refitter {
    const model *m;
    uint32_t per_head; // reference queries of one query head; of a shorter context, one of every position
    float *queries;    // [L, H, per_head, d] of the context that was seen last, head after head; owned
    bool *plain;       // [L] attention is a softmax of products alone; owned
    double seconds;    // spent in refitter_apply so far
} refitter;

// For contexts of up to max_tokens tokens; n_queries reference queries for each KV head, over its group, at least one
// of every query head. The caller frees it; a zero struct is allowed there.
refitter refitter_open(const model *m, uint32_t max_tokens, uint32_t n_queries);
void refitter_free(refitter *r);
// Floats that `queries` takes, for one context.
size_t refitter_floats(const refitter *r);

// Takes the queries of a layer while it is prefilled; needs VIEW_Q_RAW.
void refitter_see(refitter *r, const layer_view *view);

// Refits the entries of a cache, all of which `kept` lists of the context that was seen, n_tokens long with keys and
// values [L, G, n_tokens, d]. Layers with a window keep everything and are not changed; nor are those whose scores are
// capped or have attention sinks, for which the formulas do not hold. The bits do not depend on the number of threads.
// Fails with KVB_NUMERIC if the model's numbers are not finite.
kvb_status refitter_apply(refitter *r, const float *k, const float *v, uint32_t n_tokens, const kept_set *kept,
                          kv_cache *cache, kvb_error *err);
