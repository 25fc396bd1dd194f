// Refits cut caches (kvb_refit, docs/refit.md) with reference queries of their own context: during the prefill the
// queries of every few positions are taken before RoPE and rotated to positions after the context.
#pragma once
#include "evaluator/session.h"

typedef struct refitter refitter;

// For contexts of up to max_tokens tokens; n_queries reference queries for each KV head, over its group, at least one
// of every query head. The caller closes it; it lives as long as what observes with it.
refitter *refitter_open(const model *m, uint32_t max_tokens, uint32_t n_queries);
void refitter_close(refitter *r); // NULL is allowed

// The observer to pass as session_prefill's `also`; it passes every layer on to `also` (NULL: none).
layer_observer refitter_observer(refitter *r, const layer_observer *also);

// Refits the entries of a cache that holds what `kept` lists of the session's context, which must be the one observed
// last. Layers with a window keep everything and are not changed; nor are layers whose scores are capped or have
// attention sinks, for which the formulas do not hold. The result has the same bits for any number of threads. Fails
// with KVB_NUMERIC if the model's numbers are not finite.
kvb_status refitter_apply(refitter *r, const session *s, const kept_set *kept, kv_cache *cache, kvb_error *err);
// Returns the seconds spent in refitter_apply so far.
double refitter_seconds(const refitter *r);
