// One problem from curves to certified budgets: what `kvbudget solve` does for every (context, question) pair.
#pragma once
#include "runtime/limits.h"
#include "solver/certificate.h"
#include "solver/greedy.h"

typedef struct solve_options {
    hull_range hull;
    solve_scope scope;
    const double *ratios; // [n_rows], ascending
    uint32_t n_rows;
    const kvb_limits *limits; // NULL: only the sum of the budgets is limited; otherwise `hull` is not used
                              // (constrained.h)
} solve_options;

// Memory and results for problems of one shape; used again for each.
typedef struct problem {
    solve_options options; // ratios belongs to the caller
    loss_curves curves;
    hulls hulls;
    allocation allocation;
    double *loss, *bound,
        *lambda; // [R] each divided by the problem's total mass; 0 when that is 0. lambda: mean over the groups
} problem;

// shape: one that cache_shape_check() allows.
void problem_init(problem *p, const cache_shape *shape, const solve_options *options);
void problem_free(problem *p);

// Solves from p->curves, filled by loss_curves_fill() or by hand and loss_curves_sum().
kvb_status problem_solve(problem *p, kvb_error *err);
// The same for other curves of the same shape.
kvb_status problem_solve_curves(problem *p, const loss_curves *curves, kvb_error *err);
