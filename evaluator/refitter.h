// Refits cut caches (kvb_refit, docs/refit.md) with reference queries of their own context: while it is prefilled,
// every few positions' queries are taken before RoPE and turned to positions behind it.
#pragma once
#include "evaluator/session.h"

typedef struct refitter refitter;

// For contexts of up to max_tokens tokens; n_queries reference queries for each KV head, over its group, at least one
// of every query head. The caller closes it; it lives as long as what observes with it.
refitter *refitter_open(const model *m, uint32_t max_tokens, uint32_t n_queries);
void refitter_close(refitter *r); // NULL is allowed

// Sees a prefill: session_prefill's `also`, which may have another one behind it (NULL: none).
layer_observer refitter_observer(refitter *r, const layer_observer *also);

// Refits the entries of a cache of what `kept` lists of the session's context, which is the one that was observed last.
// Layers with a window keep everything and stay as they are, as do those whose scores are capped or have sinks, for
// which the formulas do not hold. The same bits for any number of threads. KVB_NUMERIC where the model's numbers are
// not finite.
kvb_status refitter_apply(refitter *r, const session *s, const kept_set *kept, kv_cache *cache, kvb_error *err);
// Spent in refitter_apply so far.
double refitter_seconds(const refitter *r);
