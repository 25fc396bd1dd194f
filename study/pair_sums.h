// Tables from any part of the pairs, for losses on texts that are left out. Curves are held on a coarse grid of the
// kept share (aggregate.h), so that many texts fit in memory.
#pragma once
#include "solver/robust.h"

// What the aggregations need to know of some pairs, of one text or of several.
typedef struct pair_sums {
    loss_mean mean;  // sums, not finished; mean.count pairs
    ratio_mean best; // of the pairs' own optima
} pair_sums;

// For contexts up to `longest`; `steps` of the kept share; n_rows ratios.
void pair_sums_init(pair_sums *p, const cache_shape *longest, uint32_t steps, uint32_t n_rows);
void pair_sums_free(pair_sums *p);
// Adds a pair whose problem is solved.
kvb_status pair_sums_add(pair_sums *p, const problem *pair, kvb_error *err);

// Tables [R, N] of prune ratios from n parts, of which pairs count alike. Options give the ratios [R], scope and hull.
kvb_status pair_sums_mean_ratio(double *table, const pair_sums *const *parts, uint32_t n, kvb_error *err);
kvb_status pair_sums_mean_loss(double *table, const pair_sums *const *parts, uint32_t n, double shrink,
                               const solve_options *options, kvb_error *err);
// Each part is a text. tail: share of the texts that lose most, 0 for the worst one.
kvb_status pair_sums_tail(double *table, const pair_sums *const *parts, uint32_t n, double tail,
                          const solve_options *options, kvb_error *err);
