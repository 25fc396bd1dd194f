// Reference queries, to which cut caches are refitted (kvb_refit, docs/refit.md): during a prefill the queries of every
// few positions are taken before RoPE and rotated to positions after the context.
#pragma once
#include "profiler/model/forward.h"

enum { REFERENCES_PER_HEAD = 256 }; // the usual number for one query head (docs/refit.md)

typedef struct references {
    const model *m;
    uint32_t per_head; // of one query head; a shorter context gives one for every position
    float *queries;    // [L, H, per_head, d] of the context that was seen last, head after head; owned
    bool *plain;       // [L] plain attention, for which kvb_refit's formulas hold: no window, softcap, sinks; owned
} references;

// Opens references for contexts of up to max_tokens tokens: n_queries per KV head, shared out over its group, at least
// one per query head. The caller frees them with references_free, which accepts a zero struct.
references references_open(const model *m, uint32_t max_tokens, uint32_t n_queries);
void references_free(references *r);
// Returns how many floats `queries` takes, for one context.
size_t references_floats(const references *r);

// Takes the queries of a layer while it is prefilled; needs VIEW_Q_RAW.
void references_see(references *r, const layer_view *view);
// Returns what kvb_refit() is to know of a KV head of a context of n_tokens tokens beside what is kept of it.
kvb_refit_head references_head(const references *r, const float *k, const float *v, uint32_t n_tokens, uint32_t layer,
                               uint32_t g);
