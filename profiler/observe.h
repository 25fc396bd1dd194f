// What a scorer may look at. The forward pass fills one view per layer of the context's prefill and never lets an observer change it.
//
// | name  | shape     | layout    | what                                                     |
// |-------|-----------|-----------|----------------------------------------------------------|
// | q_raw | [T, H, d] | row-major | queries before RoPE (after a bias, where a model has one) |
// | q     | [T, H, d] | row-major | queries after RoPE                                        |
// | k     | [G, T, d] | row-major | keys after RoPE, as cached                                |
// | v     | [G, T, d] | row-major | values, as cached                                         |
//
// Pointers are host memory and live until the observer returns.
#pragma once
#include "runtime/kvbudget.h"
#include <stdint.h>

typedef struct layer_view {
    uint32_t layer;
    uint32_t n_tokens, n_heads, n_kv_heads, head_dim, rope_dim; // T, H, G, d
    const float *rope_frequency;                                // [rope_dim/2], radians per position
    const float *q_raw, *q, *k, *v;
} layer_view;

// Called once per layer, in order. A status other than KVB_OK stops the prefill.
typedef struct layer_observer {
    kvb_status (*see)(void *context, const layer_view *view, kvb_error *err);
    void *context;
} layer_observer;
