// The true optimum at token resolution, for all ratios of a table.
//
// Greedy (greedy.h) is optimal for the hulls of the loss curves; this is the optimum for the curves themselves, found
// for every ratio and group of heads by exact_core.h. Greedy's slope is the best multiplier there is (it solves the
// dual of the relaxed problem), and its budgets are kept wherever nothing is better, so a metric that ranks perfectly
// gets the same table. The rows are solved one by one, each from greedy alone, because the result must depend neither
// on the number of threads nor on which rows are asked for. Optima need not be nested: a head may get more tokens when
// all together get fewer.
#pragma once
#include "solver/exact_core.h"
#include "solver/greedy.h"

#define EXACT_MAX_WORK 20000000000ull  // relaxations per ratio and group: about 10 s
#define EXACT_MAX_BYTES (256ull << 20) // of states per thread

// Of R ratios; losses are absolute, not divided by the curves' total.
typedef struct exact_result {
    uint32_t n_rows, n_heads, n_groups;
    uint32_t *keep;  // [R, N] tokens that stay; a row sums to greedy's row, in every group
    double *greedy;  // [R] greedy's loss
    double *optimum; // [R] the least loss there is, that of keep
    double *bound;   // [R] D(lambda), 0 .. optimum
    uint8_t *proved; // [R] 0: a limit was met, and `optimum` is greedy's loss in at least one group
    uint64_t work;   // relaxations in all
} exact_result;

// The optimum of every row; a row's budget in each group is what greedy's row keeps there. `greedy` is what
// greedy_sweep() made of these curves, with any hull. KVB_ARGUMENT: budgets that do not belong to the curves. On
// failure *x is zero.
kvb_status exact_solve(exact_result *x, const loss_curves *c, const allocation *greedy, kvb_error *err);
void exact_free(exact_result *x);
