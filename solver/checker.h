// A second opinion on lower bounds, from the loss curves alone: no hulls, no sorting, no greedy sweep, nothing of
// certificate.h. It is what `kvbudget validate --certificate` trusts.
//
// For any multiplier lambda >= 0 and any budgets b_n in floor .. T that sum to B,
//     sum_n L_n(b_n)  >=  D(lambda) = sum_n min over b of [L_n(b) + lambda b]  -  lambda B.
// D is concave, and the tokens that the minimisers keep, minus B, are a slope of it. Two points with slopes of opposite
// signs bound the maximum by where their tangents meet; evaluating there closes in on it in a few steps. The sum
// without
// - lambda B is the same function for all B, so neighbouring ratios begin where the last one ended. A claimed
// bound that is at most this maximum is proved; a larger one is not, whatever multiplier is tried.
#pragma once
#include "solver/constraints.h"
#include <stdbool.h>

// The largest D of R ratios, or less by at most 1e-13 of a group's loss at the floor; groups being all heads (layers
// false) or each layer; lambda [R] or NULL: where to start. bound [R]: sums over the groups. Any number of threads, the
// same result.
void checker_rows(const loss_curves *c, bool layers, uint32_t n_rows, const double *ratios, const double *lambda,
                  double *bound);

// The same under constraints. On failure (constrained_instance_make(), or more than 8 heads with levels) bound is not
// to be used. At the same price all 2^heads sets of a layer are looked at when there are levels: O(2^G G L T) a step.
kvb_status checker_limited_rows(const loss_curves *c, const kvb_limits *limits, uint32_t n_rows, const double *ratios,
                                const double *lambda, double *bound, kvb_error *err);
