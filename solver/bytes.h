// Tokens and formats together, under one budget of bytes. Head n keeps b tokens in one of J formats; that costs
// cost[j][b] bytes and loses L_n(b) + added[n][j]. The least sum of losses within B bytes is a multiple-choice
// knapsack: one class per head, an item for every pair (j, b).
//
//     loss |8 8               Each format has a curve of its own: fewer bits begin further left and end higher up. The
//          | 8  4 4           lower convex hull of all points is solved as in greedy.h: its pieces, in bytes, are taken
//          |  8    4  16      in the order of what a byte saves, until one does not fit. What is left is spent on its
//          |   8 8   4   16   head and one other: a best pair of points, hull or not, and so on from that other head.
//          +---------- bytes  Two heads alone are solved exactly.
//
// Weak duality proves a bound for the true points, whatever the hulls are: for any lambda >= 0
//     sum of losses  >=  D(lambda) = sum_n min over (j, b) of [L_n(b) + added[n][j] + lambda cost[j][b]]  -  lambda B.
#pragma once
#include "solver/exact.h"

typedef struct bytes_problem {
    const loss_curves *curves; // the curves may rise
    uint32_t n_formats;        // J
    double *added;             // [N, J] finite, >= 0
    uint64_t *cost;            // [J, T + 1] bytes; grows with b
} bytes_problem;

// Solves for budgets [n_rows] of bytes, which descend. Fails with KVB_ARGUMENT if they do not, or if an added loss or a
// cost is not as said above. If even the cheapest choice of all heads exceeds a budget, the row is that choice and is
// saturated. On failure *out is zero; the caller frees it (solved_rows_free).
kvb_status bytes_solve(solved_rows *out, const bytes_problem *p, const uint64_t *budget, uint32_t n_rows,
                       kvb_error *err);

// D(lambda) of a budget, from all points: no hull, no order.
double bytes_bound(const bytes_problem *p, uint64_t budget, double lambda);
