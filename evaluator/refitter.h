// Refits cut caches (kvb_refit, docs/refit.md) with reference queries of their own context: during the prefill the
// queries of every few positions are taken before RoPE and rotated to positions after the context.
#pragma once
#include "evaluator/cache.h"
#include "profiler/model/forward.h"

enum { REFITTER_PER_HEAD = 256 }; // the usual number of reference queries per query head (docs/refit.md)

typedef struct refitter {
    const model *m;
    uint32_t per_head; // reference queries of one query head; a shorter context gives one for every position
    float *queries;    // [L, H, per_head, d] of the context that was seen last, head after head; owned
    bool *plain;       // [L] plain attention, without window, softcap or sinks; owned
    double seconds;    // spent in refitter_apply so far
} refitter;

// Opens a refitter for contexts of up to max_tokens tokens, with n_queries reference queries per KV head, shared out
// over its group, at least one per query head. The caller frees it with refitter_free, which accepts a zero struct.
refitter refitter_open(const model *m, uint32_t max_tokens, uint32_t n_queries);
void refitter_free(refitter *r);
// Returns how many floats `queries` takes, for one context.
size_t refitter_floats(const refitter *r);

// Takes the queries of a layer while it is prefilled; needs VIEW_Q_RAW.
void refitter_see(refitter *r, const layer_view *view);

// Refits a cache that was cut to `kept` of the context that was seen last, n_tokens tokens with keys and values k, v
// [L, G, n_tokens, d]. Heads that keep more than half of it are not changed, nor are layers with a window, a softcap or
// attention sinks, for which the formulas do not hold. The bits do not depend on the number of threads. Fails with
// KVB_NUMERIC if the model's numbers are not finite.
kvb_status refitter_apply(refitter *r, const float *k, const float *v, uint32_t n_tokens, const kept_set *kept,
                          kv_cache *cache, kvb_error *err);
