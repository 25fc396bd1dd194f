// One group under caps or levels, solved exactly: a dynamic program within every part, and one over the parts.
//
// With multipliers lambda of the budget and p of the part (constrained.h) a part that keeps x units costs, beyond its
// share of the bound D,
//
//     cost(x) = min over the part's budgets that sum to x of [ loss + p x ]
//               - min over all budgets + (p - lambda)(cap - x)  >=  0
//
// for x <= cap, and the whole loss is D + sum of the parts' costs + lambda times the units not spent. So no part of a
// solution that is better than a known one costs more than theta = that loss - D. cost(x) up to theta comes from a
// dynamic program over the part's heads, whose own choices are limited by theta in the same way, or, with levels, from
// all partitions into clusters that stay within theta. A second program joins the parts. As in exact.h theta is first
// 1/1024 of the gap, times 4 until a solution is found, which then is the optimum.
//
// Levels: at most K different budgets among the heads of a layer.
//
// A layer's heads split into at most K clusters, and the heads of a cluster S keep the same. At a price p per unit
//
//     m(p) = min over partitions into <= K clusters of  sum over clusters S of  m_S(p),
//     m_S(p) = min over b of [ C_S(b) + p |S| b ],      C_S(b) = sum over heads h of S of L_h(b),
//
// b being in the range that all of S allow. The minima m_S come from the lower hulls of the 2^n curves C_S, made once;
// the best partition from a dynamic program over sets, 3^n steps for each of K. That bounds n: LEVELS_MAX_HEADS.
#pragma once
#include "solver/constraints.h"
#include "solver/exact.h"

#define LEVELS_MAX_HEADS 8

typedef struct level_point { // a corner of the hull of C_S
    uint32_t keep;
    double loss;
} level_point;

typedef struct level_part {
    const constrained_instance *x;
    uint32_t first, n, levels; // heads first .. first + n - 1 of x
    size_t *begin; // [2^n + 1] corners of set S: point[begin[S]] .. point[begin[S + 1] - 1]; none: impossible
    level_point *point;
} level_part;

// Hulls of part `part` of an instance. Errors: KVB_UNSUPPORTED for more heads than LEVELS_MAX_HEADS, KVB_ARGUMENT when
// the limits of the heads need more levels. On failure *p is zero.
kvb_status level_part_make(level_part *p, const constrained_instance *x, uint32_t part, kvb_error *err);
void level_part_free(level_part *p);

// Best clusters at one price.
typedef struct level_answer {
    double value;                          // m(price)
    uint64_t total;                        // units of the minimiser; of equal ones the fewest
    uint32_t keep[LEVELS_MAX_HEADS];       // its budgets
    double set[1 << LEVELS_MAX_HEADS];     // m_S; INFINITY: S allows no common budget
    double best[1 << LEVELS_MAX_HEADS][8]; // [S][k - 1]: S in at most k clusters
} level_answer;
void level_part_price(const level_part *p, double price, level_answer *a);

typedef struct layered_problem {
    const constrained_instance *x;
    const level_part *levels; // [groups * parts] or NULL: no levels
    uint32_t group;
    uint64_t budget;       // units
    double lambda;         // >= 0
    const double *price;   // [parts] >= lambda where the cap binds, else anything up to lambda
    const uint32_t *start; // [parts * own] allowed budgets, a solution to improve on
    uint64_t max_work, max_bytes;
} layered_problem;

typedef struct layered_work layered_work; // memory, used again; one for each thread

layered_work *layered_work_new(void);
void layered_work_free(layered_work *w);

// Fills keep [parts * own] (units) and *answer as core_solve() does.
void layered_solve(layered_work *w, const layered_problem *p, uint32_t *keep, core_answer *answer);

// A part's share of D: min over its budgets of (loss + price x) - (price - lambda) cap, price being raised to lambda.
double layered_part_dual(const constrained_instance *x, const level_part *levels, uint32_t part, double price,
                         double lambda);
