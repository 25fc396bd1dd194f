// Budgets from measured loss curves: how much the predictions change when one head alone is cut, instead of the
// importance that it loses. KL is roughly additive over heads (docs/refine.md), so solving with convex hulls and greedy
// gives budgets with a small total loss.
#pragma once
#include "study/shift.h"
#include <stdbool.h>

enum { MEASURED_LEVELS_MAX = 6 };
// Chooses the ratios at which to measure heads, given the knots: levels [MEASURED_LEVELS_MAX], ascending, from well
// below the first knot to well above the last. Returns how many.
uint32_t measured_levels(const double *knots, uint32_t n_knots, double *levels);

// Solves for budgets. loss [n_levels, L*G] is measured with head h alone keeping what the base's column says at
// levels[i] (ascending, at least 2) and all other heads keeping everything. Values below 0 count as 0, and losses are
// made non-decreasing in the ratio. shift [n_knots, L*G] receives the shifts that move every head to its budget
// (shift.h); unless `heads`, all heads of a layer are shifted by the same amount. Errors: KVB_ARGUMENT, KVB_NUMERIC if
// a loss is NaN, KVB_MEMORY.
kvb_status measured_shifts(const shift_base *base, const double *levels, uint32_t n_levels, const double *loss,
                           bool heads, const double *knots, uint32_t n_knots, double *shift, kvb_error *err);
// Computes the shift [n_knots, L*G] that moves every head of `base` to what it keeps at the knots in `to` (same heads).
void shifts_to_table(const shift_base *base, const shift_base *to, const double *knots, uint32_t n_knots,
                     double *shift);
