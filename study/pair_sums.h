// Makes tables from any subset of the pairs, to measure losses on the texts that are left out. Curves are held on a
// coarse grid of the kept share (aggregate.h), so that many texts fit in memory.
#pragma once
#include "solver/robust.h"

// What the aggregations need to know about a set of pairs, of one text or of several.
typedef struct pair_sums {
    loss_mean mean;  // sums, not finished; mean.count pairs
    ratio_mean best; // of the pairs' own optima
} pair_sums;

// Begins empty sums for contexts up to `longest`, with `steps` steps of the kept share and n_rows ratios.
void pair_sums_init(pair_sums *p, const cache_shape *longest, uint32_t steps, uint32_t n_rows);
void pair_sums_free(pair_sums *p);
// Adds a pair whose problem is solved.
kvb_status pair_sums_add(pair_sums *p, const problem *pair, kvb_error *err);

// Compute tables [R, N] of prune ratios from n sets of pairs; every pair has the same weight. The options give the
// ratios [R], scope and hull.
kvb_status pair_sums_mean_ratio(double *table, const pair_sums *const *parts, uint32_t n, kvb_error *err);
kvb_status pair_sums_mean_loss(double *table, const pair_sums *const *parts, uint32_t n, double shrink,
                               const solve_options *options, kvb_error *err);
// The same for the texts that lose most: each set is one text, and tail is their share, 0 for the worst one.
kvb_status pair_sums_tail(double *table, const pair_sums *const *parts, uint32_t n, double tail,
                          const solve_options *options, kvb_error *err);
