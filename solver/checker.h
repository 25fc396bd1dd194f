// An independent check of lower bounds, from the loss curves alone: it uses no hulls, no sorting, no greedy sweep and
// nothing from certificate.h. `kvbudget validate --certificate` relies on it.
//
// For any multiplier lambda >= 0 and any budgets b_n in floor .. T that sum to B,
//     sum_n L_n(b_n)  >=  D(lambda) = sum_n min over b of [L_n(b) + lambda b]  -  lambda B.
// D is concave, and the tokens that the minimisers keep, minus B, are a slope of it. Two points with slopes of opposite
// signs bound the maximum: it is below the point where their tangents meet. Evaluating D there converges in a few
// steps. The sum without - lambda B is the same function for all B, so each ratio starts where the previous one ended.
// A claimed bound that is at most this maximum is proved; a larger one is not, whatever multiplier is tried.
#pragma once
#include "solver/constraints.h"
#include <stdbool.h>

// Computes the largest D for R ratios, to within 1e-13 of a group's loss at the floor. A group is all heads, or each
// layer if `layers`. lambda [R] says where to start, and may be NULL. bound [R] receives the sums over the groups. The
// result does not depend on the number of threads.
void checker_rows(const loss_curves *c, bool layers, uint32_t n_rows, const double *ratios, const double *lambda,
                  double *bound);

// Heads that may store keys and values in formats of their own, which is what bytes.h solves; costs and losses are
// worked out here again.
typedef struct checker_formats {
    const loss_curves *curves;
    const double *loss; // [N, 6] what keys lose besides as int8, int4 and int2, and then values as these
    uint32_t head_dim;
    unsigned choices; // bit p: the kvb_packing p could be chosen
} checker_formats;

typedef struct checked_row {
    double bound; // D(lambda): the budgets are of bytes, and every head chooses tokens and formats
    double loss;  // of the row
    double added; // the part of the loss that its formats cause
    bool fits;    // its formats are choices, and it is within the ratio's share of a bf16 cache or the least possible
} checked_row;

// Checks R rows at their multipliers lambda >= 0: keep [R, N] tokens, formats [R, N, 2] of keys and values.
void checker_formats_rows(const checker_formats *f, uint32_t n_rows, const double *ratios, const double *lambda,
                          const uint32_t *keep, const uint8_t *formats, checked_row *out /* [R] */);

// The same as checker_rows() under constraints. On failure (constrained_instance_make(), or more than 8 heads with
// levels) the contents of bound are undefined. With levels, every step looks at all 2^heads sets of a layer: O(2^G G L
// T).
kvb_status checker_limited_rows(const loss_curves *c, const kvb_limits *limits, uint32_t n_rows, const double *ratios,
                                const double *lambda, double *bound, kvb_error *err);
