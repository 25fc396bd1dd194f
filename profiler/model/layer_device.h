// A layer's tensors on a device with memory of its own, and the sums that scorers take from them there: what comes down
// is [H,T], [G,T] or [H,d,d], where q, k and v would be [T, (H + 2 G) d]. Views of host memory have none of this; a
// scorer reads the tensors then.
//
// Every function fills host arrays and fails with KVB_MEMORY alone, when the device has no room; other failures show in
// backend.check.
#pragma once
#include "profiler/backend/backend.h"
#include "profiler/model/observe.h"

// Memory for the results of one call; grows, and belongs to the forward pass.
typedef struct device_scratch {
    dev memory;
    size_t floats;
} device_scratch;

typedef struct layer_device {
    backend_device *on;
    attention_shape shape;
    prefix_kv kv;
    dev q_raw, q; // [T, H*d]
    device_scratch *scratch;
} layer_device;

// votes[h,j] = sum over the last `window` queries of A[h,w,j]; [H,T], 1 <= window <= T
kvb_status device_window_votes(const layer_device *at, uint32_t window, float *votes, kvb_error *err);

// ||k_j|| (VIEW_K) or ||v_j|| (VIEW_V), [G,T]
kvb_status device_norms(const layer_device *at, view_item item, float *norms, kvb_error *err);

// Mean [H,d] and, unless NULL, covariance [H,d,d] (divisor n) of the queries before RoPE, rows `from` to T - 1.
kvb_status device_query_moments(const layer_device *at, uint32_t from, float *mean, float *covariance, kvb_error *err);

// Mean [G,d] of the keys, or of the keys divided by their norms.
kvb_status device_key_mean(const layer_device *at, bool normalised, float *mean, kvb_error *err);

// out [n_heads,T]: (linear_h + square_h k_j) . k_j over the keys of KV head h / (n_heads / G); n_heads H or G; square
// may be NULL
kvb_status device_quadratic(const layer_device *at, uint32_t n_heads, const float *linear, const float *square,
                            float *out, kvb_error *err);

// LagKV's spreads of the keys (VIEW_K) or values (VIEW_V), [G,T]: backend.h; outside of the partitions 0
kvb_status device_spreads(const layer_device *at, view_item item, partition_row row, float *out, kvb_error *err);
