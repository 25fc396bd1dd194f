// Sums over a layer's tensors that scorers use. What enters an exponent or a quotient is in double, so that rounding
// does not change a ranking.
#pragma once
#include "profiler/model/observe.h"
#include <stdbool.h>

// votes[h,j] = factor times the sum over the last `window` queries of the attention A[h,w,j]; [H,T], 1 <= window <= T
void layer_window_votes(const layer_view *view, uint32_t window, float factor, float *votes);

// votes[g,j] = the sum, or the maximum, over the last `window` queries w of the sum over h in g of A[h,w,j]; [G,T]
void layer_group_votes(const layer_view *view, uint32_t window, bool maximum, float *votes);

// ||k_j|| (VIEW_K) or ||v_j|| (VIEW_V), [G,T]
void layer_norms(const layer_view *view, view_item item, double *norms);

// Mean [H,d] and, unless NULL, covariance [H,d,d] (divisor n) of the queries before RoPE that belong to keys `from` and
// later, or of all queries in the view if it has fewer.
void layer_query_moments(const layer_view *view, uint32_t from, double *mean, double *covariance);

// Mean [G,d] of the keys, or of the keys divided by their norms.
void layer_key_means(const layer_view *view, bool normalised, double *mean);

// A form in the keys, per head: a (linear_h . k_j) + b (k_j^T square_h k_j).
typedef struct key_form {
    uint32_t n_heads;     // H or G; head h reads the keys of KV head h / (n_heads / G)
    const double *linear; // [n_heads, d]
    const double *square; // [n_heads, d, d]; NULL: none
    double a, b;
} key_form;

// Computes the form of every key, z [n_heads, T].
void layer_key_forms(const layer_view *view, const key_form *form, double *z);

// `count` partitions of `size` tokens, one after the other from token `first` on; unless `own`, one more follows them.
typedef struct partition_row {
    uint32_t first, size, count;
    bool own; // each is compared with itself, not with the next one
} partition_row;

// LagKV's spreads of the keys (VIEW_K) or values (VIEW_V), [G,T]: partition_spreads of each partition. Tokens outside
// the partitions are not written.
void layer_spreads(const layer_view *view, view_item item, partition_row row, float *out);

// The spreads of one partition: t[j] = the standard deviation over channels (divisor d - 1) of (z_j - min) / (max -
// min), where min and max run over the n_ref rows of `ref`, per channel. z [n,d], ref [n_ref,d]; a channel whose
// reference is constant counts as 0. scratch [3 d]
void partition_spreads(float *t, const float *z, uint32_t n, const float *ref, uint32_t n_ref, uint32_t d,
                       float *scratch);
