// A certificate for an allocation that does not rely on how it was found: no hull, no sorting.
//
// For any multiplier lambda >= 0 and any budgets b_n in floor .. T with sum b_n = B,
//     sum_n loss_n(b_n)  >=  D(lambda) = sum_n min over b of [loss_n(b) + lambda b]  -  lambda B
// (Lagrangian relaxation, Everett 1963). So D(lambda) <= OPT <= loss(greedy): if both ends are equal, greedy is proved
// optimal; otherwise their difference bounds how far greedy is from it. A good lambda is the slope at which the sweep
// stopped; a bad one only weakens the bound. With SCOPE_LAYER each layer is a problem with its own multiplier.
#pragma once
#include "solver/curve.h"

// Loss of the heads first .. first + n - 1 that keep keep[0] .. keep[n - 1] tokens.
double certificate_loss(const loss_curves *c, uint32_t first, uint32_t n, const uint32_t *keep);

// Loss and D(lambda) of R rows. keep [R,N]; lambda [R, n_groups], non-negative and ascending within each group, since
// rows go from low ratios to high ones; group k holds heads k N / n_groups and the following N / n_groups. A row's
// budgets are the sums of its keep. In O(N T log R): the best b falls as lambda grows, so the row in the middle splits
// the search for all others. bound is kept within [0, loss]. Errors: KVB_ARGUMENT, and KVB_NUMERIC if a bound exceeds
// its loss by more than rounding, which only happens with a damaged problem.
kvb_status certificate_rows(const loss_curves *c, uint32_t n_rows, uint32_t n_groups, const uint32_t *keep,
                            const double *lambda, double *loss /* [R] */, double *bound /* [R] */, kvb_error *err);
