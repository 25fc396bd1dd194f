// Solves for budgets under constraints, by greedy on the constrained hulls or exactly, with a certificate.
//
// Greedy. Without levels, the blocks of the heads' hulls over least .. most are drained cheapest first, as in greedy.h:
// first within every part until it meets its cap, at the price p_part of the last block touched (0 if nothing had to be
// drained), then within every group, from row to row, at the price lambda. Caps form a laminar family, so this is the
// optimum of the hulls. With levels, lambda is the multiplier at which the parts' best clusters (layered.h) use up the
// budget; leftover units go to the clusters where they save most.
//
// Certificate. For any lambda >= 0 of a group and p_part >= lambda of its parts, and budgets b within all limits,
//
//     sum_h L_h(b_h)  >=  D
//     D = sum over parts [ min over allowed b of (loss + p_part tokens) - (p_part - lambda) cap ] - lambda B
//
// with p_part = max(lambda, the part's cap price); levels restrict the minimum. checker.h computes D independently.
//
// Exact. Without caps and levels every group is a problem of exact.h with limits for each head; otherwise layered.h
// joins parts that are solved on their own.
#pragma once
#include "solver/constraints.h"
#include "solver/exact.h"

// ratios [n_rows] ascend; `exact` asks for the optimum instead of greedy's budgets. On failure *out is zero. Errors:
// KVB_ARGUMENT for contradictions (constraints.h), KVB_UNSUPPORTED.
kvb_status constrained_solve(solved_rows *out, const loss_curves *curves, const kvb_limits *limits,
                             const double *ratios, uint32_t n_rows, bool exact, kvb_error *err);

// Projects every row of prune ratios [R, L, G], for example averages over many problems, onto the allowed budgets:
// whole pages of T tokens that use the row's full budget and have the least sum of squared differences from (1 - r) T.
// The solver needs falling costs; subtracting 2 T block for every page makes them fall, and changes nothing for a given
// number of pages. floor_tokens: the fewest tokens that a head keeps. saturated [R] as in solved_rows.
kvb_status constrained_project(const kvb_limits *limits, const cache_shape *shape, uint32_t floor_tokens,
                               const double *ratios, uint32_t n_rows, double *prune_ratio, uint8_t *saturated,
                               kvb_error *err);

// Fails with KVB_ARGUMENT, naming the ratio and both numbers, if a row's lower limits exceed its budget. For ratios
// that the user chose individually.
kvb_status constrained_require(const loss_curves *curves, const kvb_limits *limits, const double *ratios,
                               uint32_t n_rows, kvb_error *err);

// Like table_loss_add() for a constrained table: rounds each row by the runtime's rule, kvb_limits_round(), and adds
// the relative loss to sum [R]. prune_ratio [R, L, G]; keep [N] is scratch. Fails with KVB_UNSUPPORTED if no budgets
// fit at this number of tokens.
kvb_status constrained_loss_add(double *sum, const loss_curves *c, const kvb_limits *limits, uint32_t n_rows,
                                const double *prune_ratio, uint32_t *keep, kvb_error *err);
