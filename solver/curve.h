// Loss curves: how much oracle importance a KV head loses when it keeps only its b best tokens.
//
// The T tokens of a context split into the protected ones P = [0, sink) and [T - window, T), which are always kept, and
// the middle region of M = T - sink - window tokens. For head n = l * G + g the metric orders the middle region: o_1 ..
// o_M, best first. With a_i the oracle importance of token o_i, keeping c middle tokens (b = c + |P| in all) loses
//
//     loss_n(c) = sum over i > c of a_i,    c = 0 .. M,   loss_n(M) = 0        (LU-KV section 4.1; methods.md 2.3)
//
//     loss |*                  The curve never rises, but it is convex only if the metric ranks as the oracle would.
//          | *                 If it is not (a good token after worse ones), the greedy solver needs its convex hull:
//          |  *  *  *          pava.h.
//          |           *  *
//          +------------------- c      Sums are f64; importances come in as f32.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Loops over fewer numbers than this run on one thread: waking the others costs more than it saves.
#define PARALLEL_CELLS 200000

// The cache of one context. n_layers = L, n_kv_heads = G, n_tokens = T.
typedef struct cache_shape {
    uint32_t n_layers, n_kv_heads, n_tokens;
    uint32_t sink, window; // protected tokens at the start and at the end
} cache_shape;

// Fails with KVB_ARGUMENT if a count is 0, if sink + window >= T (no token is left to choose), or if N * T numbers
// exceed the address range.
kvb_status cache_shape_check(const cache_shape *shape, kvb_error *err);

static inline uint32_t shape_heads(const cache_shape *s)
{
    return s->n_layers * s->n_kv_heads;
} // N
static inline uint32_t shape_protected(const cache_shape *s)
{
    return s->sink + s->window;
} // |P|
static inline uint32_t shape_middle(const cache_shape *s)
{
    return s->n_tokens - s->sink - s->window;
} // M

// Returns the fewest tokens that the solver leaves a head: max(rint((1.0 - 0.99) * T), sink + window), since at most 99
// % of a head is pruned (LU-KV appendix E). The expression is evaluated in double exactly as written: 1.0 - 0.99 is a
// little more than 0.01, which decides T = 4050 (41, not 40).
uint32_t shape_floor(const cache_shape *shape);

// The middle region of every head in the metric's order. It depends on context and metric only: all questions of a
// context share it.
typedef struct metric_order {
    cache_shape shape;
    uint32_t *position; // [N, M] positions in 0 .. T-1, best first
} metric_order;

// scores [L,G,T], higher = keep. Equal scores: the lower position wins (-0 equals +0); infinities order as numbers.
// Errors: KVB_NUMERIC for NaN (naming layer, head and position); those of cache_shape_check(). On failure *out is zero.
kvb_status metric_order_make(metric_order *out, const cache_shape *shape, const float *scores, kvb_error *err);
void metric_order_free(metric_order *order);

// One problem of the solver: all heads' gains and loss curves.
typedef struct loss_curves {
    cache_shape shape;
    uint32_t floor; // every head keeps at least this many tokens; sink + window <= floor <= T
    double *gain;   // [N, M] gain[n][i] = a_{i+1}, finite and, unless `rises`, >= 0
    double *loss;   // [N, M + 1] loss[n][c]
    double total;   // sum of loss[n][0], the mass that can be lost; or another number to divide losses by
    bool rises;     // gains may be below 0: keeping more tokens may lose more, though keeping all loses nothing
} loss_curves;

// Allocates curves, all 0, with floor = shape_floor(shape). The shape must be one that cache_shape_check() allows.
loss_curves loss_curves_make(const cache_shape *shape);
void loss_curves_free(loss_curves *c);

// Gathers the gains from oracle [L,G,T] in the metric's order and sums them. The curves must have been made for the
// order's shape. Errors: KVB_NUMERIC for a value that is NaN, infinite or negative (naming layer, head and position),
// KVB_ARGUMENT.
kvb_status loss_curves_fill(loss_curves *c, const metric_order *order, const float *oracle, kvb_error *err);

// The same in the oracle's own order, that of a perfect metric, for budgets "without the optimality gap" (LU-KV section
// 5.4; methods.md 2.9).
kvb_status loss_curves_fill_perfect(loss_curves *c, const float *oracle, kvb_error *err);

// Makes `loss` and `total` from `gain`, which the caller has set.
void loss_curves_sum(loss_curves *c);

// Returns the loss of head n when it keeps b tokens; with fewer than the protected ones it keeps no middle token.
static inline double loss_at(const loss_curves *c, uint32_t n, uint32_t b)
{
    uint32_t p = shape_protected(&c->shape), m = shape_middle(&c->shape);
    return c->loss[(size_t)n * (m + 1) + (b > p ? b - p : 0)];
}
