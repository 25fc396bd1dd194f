// Budgets from measured loss curves: what the predictions lose when one head alone is cut, in place of the importance
// that it loses. KL adds up over heads, roughly (docs/refine.md), so the solver's own way, convex hulls and greedy,
// gives budgets that lose little together.
#pragma once
#include "study/shift.h"
#include <stdbool.h>

enum { MEASURED_LEVELS_MAX = 6 };
// At which ratios heads should be measured for tables whose knots these are: levels [MEASURED_LEVELS_MAX], ascending,
// from well below the first knot to well above the last. How many.
uint32_t measured_levels(const double *knots, uint32_t n_knots, double *levels);

// loss [n_levels, L*G]: head h alone keeps what the base's column says at levels[i] (ascending, at least 2), all others
// everything; values below 0 count as 0, and a head that seems to lose less at a higher ratio as losing the same.
// shift [n_knots, L*G] receives what moves every head to its budget (shift.h), all heads of a layer by the same amount
// unless `heads`. Errors: KVB_ARGUMENT, KVB_NUMERIC for a loss that is no number, KVB_MEMORY.
kvb_status measured_shifts(const shift_base *base, const double *levels, uint32_t n_levels, const double *loss,
                           bool heads, const double *knots, uint32_t n_knots, double *shift, kvb_error *err);
// shift [n_knots, L*G] that moves every head of `base` to what it keeps in `to`, a table of as many heads, at the
// knots.
void shifts_to_table(const shift_base *base, const shift_base *to, const double *knots, uint32_t n_knots,
                     double *shift);
