// The true optimum at token resolution, for all ratios of a table.
//
// Greedy (greedy.h) is optimal for the hulls of the loss curves; this is the optimum for the curves themselves, found
// for every ratio and group of heads. Greedy's slope is the best possible multiplier (it solves the dual of the relaxed
// problem), and its budgets are kept unless others are better, so a metric that ranks perfectly gets the same table.
// The rows are solved one by one, each from greedy alone, because the result must depend neither on the number of
// threads nor on which rows are asked for. Optima need not be nested: a head may get more of a smaller total.
//
// One group of heads at one budget, solved exactly at token resolution.
//
// With any multiplier lambda the loss of budgets b_n that sum to B is
//
//     sum_n L_n(b_n)  =  D(lambda) + sum_n rc_n(b_n)
//     rc_n(b) = L_n(b) + lambda b - min over b' of [L_n(b') + lambda b']  >=  0
//
// so the best budgets have the least sum of reduced costs rc, and no choice of theirs can have a reduced cost above
// theta = UB - D(lambda) for any loss UB that some budgets reach (Pisinger's core, EJOR 83, 1995; methods.md 2.6). This
// leaves a dynamic program whose state is how many more or fewer tokens the heads so far keep than the minimisers b'.
// Three things keep it small:
//   - theta is a guess first, 1/1024 of the gap of the known solution, times 4 until a solution is found. A program
//   with theta sees every solution within theta, so the best it finds is the optimum;
//   - a state is dropped when its cost and the least cost at which the other heads can make up for its tokens exceed
//     theta. That least cost is taken from the lower hulls of the choices that are left, merged by slope;
//   - a choice that keeps more tokens than another for the same loss is dropped. Tokens may stay unspent for that,
//     each at the price lambda, and are given back in the end: curves never rise.
// Rounding. A reduced cost consists of two differences and one product, each with an error of at most half a unit in
// the last place of L_n(floor) + lambda T; adding N of them, or comparing them to theta, adds N theta of such units.
// All limits are therefore wider by 2^-50 (sum_n L_n(floor) + lambda N T + N theta), 8 units: more than the errors can
// sum up to. Wider limits keep more choices and never lose one: the result is the optimum up to that margin.
#pragma once
#include "solver/greedy.h"
#include <stdbool.h>

typedef struct core_problem {
    const loss_curves *curves;
    uint32_t first, n;     // heads first .. first + n - 1
    const uint32_t *least; // [n] fewest tokens that each may keep, floor .. cap; NULL: the floor
    const uint32_t *cap;   // [n] most tokens that each may keep, floor .. T; NULL: T
    const uint32_t *start; // [n] budgets within least .. cap; their sum is the budget
    double lambda;         // multiplier >= 0; a good one keeps the problem small, any one is correct
    uint64_t max_work;     // relaxations, after which the solver gives up
    uint64_t max_bytes;    // of states
} core_problem;

typedef struct core_answer {
    double margin; // keep is the optimum up to this
    double gap;    // loss of start - D(lambda), >= 0
    double lambda; // the multiplier used: the problem's, or a better one
    uint64_t work; // relaxations
    bool proved;   // false: given up; keep is start
} core_answer;

typedef struct core_work core_work; // memory, used again from problem to problem; one for each thread

core_work *core_work_new(void);
void core_work_free(core_work *w);

// One step of the dynamic program: to[i] = min(to[i], from[i] + cost), i = 0 .. n - 1.
void core_relax(double *restrict to, const double *restrict from, size_t n, double cost);

// Fills keep [n], with the same sum as start, and *answer. Returns start itself if it is optimal up to the margin. Of
// several optima every run finds the same one.
void core_solve(core_work *w, const core_problem *p, uint32_t *keep, core_answer *answer);

#define EXACT_MAX_WORK 20000000000ull  // relaxations per ratio and group: about 10 s
#define EXACT_MAX_BYTES (256ull << 20) // of states per thread

// Solutions for R ratios, also by constrained_solve() and bytes_solve(); losses are absolute, not divided by the total.
typedef struct solved_rows {
    uint32_t n_rows, n_heads;
    uint32_t *keep;     // [R, N] tokens that stay, at most T
    double *greedy;     // [R] greedy's loss
    double *loss;       // [R] of keep: the optimum, or greedy's loss if the optimum was not asked for
    double *bound;      // [R] D(lambda), 0 .. loss
    double *lambda;     // [R] under constraints: mean over the groups, per token; of bytes: what one more would save
    uint8_t *saturated; // [R] under constraints, 1: lower limits or floors exceed the ratio's budget
    uint8_t *proved;    // [R] 1: keep is optimal; 0: a limit was met in a group, whose budgets are greedy's
    uint8_t *format;    // [R, N] of bytes_solve(), and ..
    uint64_t *bytes;    // [R] .. that these take; else NULL
    uint64_t work;      // relaxations in all
} solved_rows;

solved_rows solved_rows_make(uint32_t n_rows, uint32_t n_heads); // all zero
void solved_rows_free(solved_rows *x);                           // leaves it zero

// Solves every row exactly; a row's budget in each group is what greedy's row keeps there. `greedy` comes from
// greedy_sweep() for these curves, with any hull. Fails with KVB_ARGUMENT if its budgets do not fit the curves. On
// failure *x is zero.
kvb_status exact_solve(solved_rows *x, const loss_curves *c, const allocation *greedy, kvb_error *err);
