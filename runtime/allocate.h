// The budgets that other published methods give each KV head, for comparison: pure functions from a ratio, or from
// scores, to tokens per head. Internal, for evaluation and statistics; the public library offers tables only.
//
// Words: L layers, G KV heads, T tokens of the context, ratio: the share of the whole cache that is pruned, 0 .. 1.
// keep[l * G + g]: how many tokens head g of layer l keeps. kvb_select() decides which tokens these are: the protected
// ones first, then the best by the head's scores. Functions that return nothing cannot fail for a shape with L, G, T >=
// 1 and a ratio in [0, 1]; none allocates.
#pragma once
#include "kvbudget.h"
#include <stdbool.h>

typedef struct allocate_shape {
    uint32_t n_layers, n_kv_heads, n_tokens;
} allocate_shape;

// int(T (1 - ratio)) in double, as kvpress computes it: T = 1000, ratio = 0.8 gives 199.
uint32_t allocate_mean(const allocate_shape *s, double ratio);

// Gives every head the same budget. Returns the total number of tokens kept.
uint64_t allocate_uniform(const allocate_shape *s, double ratio, uint32_t *keep);

// Adjusts the counts so that they sum to `total`: missing tokens go to the first heads that have room, one each in
// turn; surplus tokens are taken from the last heads. All methods must keep equally many tokens before their losses are
// compared (rounding makes uniform lose up to one per head). Every head keeps at least `floor` and at most T tokens;
// `total` is clamped to what these allow.
void allocate_level(const allocate_shape *s, uint64_t total, uint32_t floor, uint32_t *keep);

// PyramidKV (kvpress's form): budgets fall linearly from the first layer to the last, the same for the heads of a
// layer. With mean = T (1 - ratio): lo = mean / beta, hi = 2 mean - lo; if hi >= T - window: hi = T - window, lo = 2
// mean - hi; layer l keeps rint(hi - l (hi - lo) / (L - 1)). Uniform, rint(mean), unless T >= hi >= lo >= window, or
// with one layer. Published: beta 20; window 8 in LU-KV's tables, 64 in kvpress, which is uniform at 80 % below 6,400
// tokens. Returns true for a pyramid, false for uniform budgets.
bool allocate_pyramid(const allocate_shape *s, double ratio, double beta, uint32_t window, uint32_t *keep);

typedef enum ada_form {
    ADA_KVPRESS,  // each head's best int(alpha n) are safe; of the rest the layer's best, n G in all
    ADA_ORIGINAL, // rint((1 - alpha) c + int(alpha m)) + window, where m = n - window and c counts the head's tokens
                  // among the layer's best m G outside of the window (AdaKV, section 4)
    ADA_GLOBAL // as ADA_KVPRESS, but all layers are pooled; not published, since no layer could run before the others
} ada_form;

// AdaKV: all heads of a layer compete, and each gets as many tokens as its scores win. n = allocate_mean(). scores
// [L,G,T], no NaN, higher = keep; published alpha 0.2. Every head keeps its first `sink` and last `window` tokens
// before any others, as if their scores were infinite; they count towards its share and do not compete. Of equal scores
// the lower head's wins. alpha = 1 gives uniform budgets.
void allocate_ada(const allocate_shape *s, double ratio, double alpha, const float *scores, uint32_t sink,
                  uint32_t window, ada_form form, uint32_t *keep);

// Divides the cache over layers in proportion to weight [L], finite and >= 0. What is divided are the unprotected
// tokens, mean - sink - window per head; a layer that would get more than all of its tokens gets all, and the surplus
// goes to the others in equal parts (CAKE's form). If all weights are 0, they count as equal. Within a layer the heads
// compete by scores [L,G,T] as in AdaKV, but without safe tokens (LAVa's form); with scores NULL they share equally
// (CAKE's).
void allocate_layers(const allocate_shape *s, double ratio, const double *weight, const float *scores, uint32_t sink,
                     uint32_t window, uint32_t *keep);
