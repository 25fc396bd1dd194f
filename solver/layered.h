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
// all partitions into clusters that stay within theta. A second program joins the parts. As in exact_core.h theta is
// first 1/1024 of the gap, times 4 until a solution is found, which then is the optimum.
#pragma once
#include "solver/exact_core.h"
#include "solver/levels.h"

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
