#include "profiler/model/layer_device.h"
#include "runtime/fail.h"

// Room for n floats on the device, or {NULL}. What was there before is lost.
static kvb_status take(const layer_device *at, size_t n, dev *memory, kvb_error *err)
{
    device_scratch *s = at->scratch;
    if (s->floats < n) {
        at->on->b->release(at->on, s->memory);
        s->memory = at->on->b->alloc(at->on, n);
        s->floats = s->memory.address ? n : 0;
    }
    *memory = s->memory;
    return s->memory.address ? KVB_OK
                             : kvb_fail(err, KVB_MEMORY,
                                        "metrics: the device has no %zu MiB for the sums of %u tokens; use fewer "
                                        "questions at a time or shorter contexts",
                                        (n >> 18) + 1, at->kv.n_tokens);
}

kvb_status device_window_votes(const layer_device *at, uint32_t window, float *votes, kvb_error *err)
{
    size_t n = (size_t)at->shape.n_heads * at->kv.n_tokens;
    dev sums;
    kvb_status status = take(at, 2 * n, &sums, err);
    if (status != KVB_OK) return status;
    at->on->b->column_sums(at->on, sums, dev_at(sums, n), at->q, &at->kv, at->kv.n_tokens - window, at->shape);
    at->on->b->download(at->on, votes, sums, n);
    return KVB_OK;
}

static dev tensor_of(const layer_device *at, view_item item)
{
    return item == VIEW_K ? at->kv.k : at->kv.v;
}

kvb_status device_norms(const layer_device *at, view_item item, float *norms, kvb_error *err)
{
    size_t n = (size_t)at->shape.n_kv_heads * at->kv.n_tokens;
    dev memory;
    kvb_status status = take(at, n, &memory, err);
    if (status != KVB_OK) return status;
    at->on->b->norms(at->on, memory, tensor_of(at, item), n, at->shape.head_dim);
    at->on->b->download(at->on, norms, memory, n);
    return KVB_OK;
}

kvb_status device_query_moments(const layer_device *at, uint32_t from, float *mean, float *covariance, kvb_error *err)
{
    uint32_t H = at->shape.n_heads, d = at->shape.head_dim;
    size_t means = (size_t)H * d, all = means * (covariance ? 1 + d : 1);
    dev memory;
    kvb_status status = take(at, all, &memory, err);
    if (status != KVB_OK) return status;
    dev matrices = covariance ? dev_at(memory, means) : (dev){NULL};
    at->on->b->moments(at->on, memory, matrices, dev_at(at->q_raw, from * means), (dev){NULL}, at->kv.n_tokens - from,
                       H, d, false);
    at->on->b->download(at->on, mean, memory, means);
    if (covariance) at->on->b->download(at->on, covariance, matrices, means * d);
    return KVB_OK;
}

kvb_status device_key_mean(const layer_device *at, bool normalised, float *mean, kvb_error *err)
{
    uint32_t G = at->shape.n_kv_heads, T = at->kv.n_tokens, d = at->shape.head_dim;
    size_t n = (size_t)G * T;
    dev memory;
    kvb_status status = take(at, n + (size_t)G * d, &memory, err);
    if (status != KVB_OK) return status;
    dev norms = normalised ? memory : (dev){NULL}, means = dev_at(memory, n);
    if (normalised) at->on->b->norms(at->on, norms, at->kv.k, n, d);
    at->on->b->moments(at->on, means, (dev){NULL}, at->kv.k, norms, T, G, d, true);
    at->on->b->download(at->on, mean, means, (size_t)G * d);
    return KVB_OK;
}

kvb_status device_quadratic(const layer_device *at, uint32_t n_heads, const float *linear, const float *square,
                            float *out, kvb_error *err)
{
    size_t n = (size_t)n_heads * at->kv.n_tokens, lines = (size_t)n_heads * at->shape.head_dim,
           squares = square ? lines * at->shape.head_dim : 0;
    dev memory;
    kvb_status status = take(at, n + lines + squares, &memory, err);
    if (status != KVB_OK) return status;
    dev weights = dev_at(memory, n), matrices = square ? dev_at(weights, lines) : (dev){NULL};
    at->on->b->upload(at->on, weights, linear, lines);
    if (square) at->on->b->upload(at->on, matrices, square, squares);
    at->on->b->quadratic(at->on, memory, &at->kv, weights, matrices,
                         attention_heads(n_heads, at->shape.n_kv_heads, at->shape.head_dim));
    at->on->b->download(at->on, out, memory, n);
    return KVB_OK;
}

kvb_status device_spreads(const layer_device *at, view_item item, partition_row row, float *out, kvb_error *err)
{
    uint32_t G = at->shape.n_kv_heads, T = at->kv.n_tokens;
    size_t n = (size_t)G * T;
    dev memory;
    kvb_status status = take(at, n, &memory, err);
    if (status != KVB_OK) return status;
    at->on->b->clear(at->on, memory, n);
    at->on->b->spreads(at->on, memory, tensor_of(at, item), T, G, at->shape.head_dim, row);
    at->on->b->download(at->on, out, memory, n);
    return KVB_OK;
}
