// From curves to budgets: the step of study_table_solve() between gathering and judging. Each fills prune_ratio, loss,
// bound, lambda and saturated of the table.
#pragma once
#include "study/table.h"

// The pair's own optimum: in p, in the spread of all, and, with AGGREGATE_MEAN_RATIO, in the table's sums.
kvb_status allocate_pair(study_table *t, ratio_mean *spread, problem *p, kvb_error *err);
// The table of all pairs together, from what was gathered.
// The least mean loss that budgets can have which all pairs share, from averages that are not pulled together yet:
// fills table_bound with AGGREGATE_MEAN_LOSS.
kvb_status bound_table(study_table *t, const gathered *g, kvb_error *err);
kvb_status allocate_table(study_table *t, const gathered *g, kvb_error *err);

// Refuses ratios that were chosen one by one where limits do not allow them.
kvb_status require_ratios(const study_options *o, const loss_curves *c, kvb_error *err);
