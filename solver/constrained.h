// Budgets under constraints: greedily on the constrained hulls, exactly, and with a certificate.
//
// Greedy. Without levels, the blocks of the heads' hulls over least .. most are drained cheapest first, as in greedy.h:
// first within every part until it meets its cap, at the price p_part of the block touched last (0: no need to), then
// within every group, from row to row, at the price lambda. Budgets within caps form a laminar family, so this is the
// optimum of the hulls. With levels, lambda is the multiplier at which the parts' best clusters (layered.h) use up the
// budget; what they leave over goes to the clusters where it saves most.
//
// Certificate. For any lambda >= 0 of a group and p_part >= lambda of its parts, and budgets b within all limits,
//
//     sum_h L_h(b_h)  >=  D
//     D = sum over parts [ min over allowed b of (loss + p_part tokens) - (p_part - lambda) cap ] - lambda B
//
// with p_part = max(lambda, the part's cap price); levels stay inside the minimum. checker.h finds D by itself.
//
// Exact. Without caps and levels every group is a problem of exact.h with limits for each head; otherwise
// layered.h joins parts that are solved on their own.
#pragma once
#include "solver/constraints.h"
#include "solver/exact.h"

// ratios [n_rows] ascending; exact: the optimum in place of greedy's budgets. On failure *out is zero. Errors:
// KVB_ARGUMENT for contradictions (constraints.h), KVB_UNSUPPORTED.
kvb_status constrained_solve(solved_rows *out, const loss_curves *curves, const kvb_limits *limits,
                             const double *ratios, uint32_t n_rows, bool exact, kvb_error *err);

// Replaces every row of prune ratios [R, L, G], averages of many problems, say, by the allowed whole-page budgets of T
// tokens with the least sum of squared differences from (1 - r) T, and the row's full budget. Squares become a problem
// of the solver by taking 2 T block off for every page, which for a given number of pages changes nothing and makes the
// costs fall.
// floor_tokens: fewest that a head keeps. saturated [R] as above.
kvb_status constrained_project(const kvb_limits *limits, const cache_shape *shape, uint32_t floor_tokens,
                               const double *ratios, uint32_t n_rows, double *prune_ratio, uint8_t *saturated,
                               kvb_error *err);

// Refuses a row whose lower limits exceed its budget; called for ratios that were asked for one by one. KVB_ARGUMENT
// with the ratio and both numbers.
kvb_status constrained_require(const loss_curves *curves, const kvb_limits *limits, const double *ratios,
                               uint32_t n_rows, kvb_error *err);

// Adds the relative loss of a constrained table on one pair to sum [R], as table_loss_add() does for others: row by row
// rounded by the runtime's rule, kvb_limits_round(). prune_ratio [R, L, G]; keep [N] is scratch. KVB_UNSUPPORTED when
// nothing fits at this number of tokens.
kvb_status constrained_loss_add(double *sum, const loss_curves *c, const kvb_limits *limits, uint32_t n_rows,
                                const double *prune_ratio, uint32_t *keep, kvb_error *err);
