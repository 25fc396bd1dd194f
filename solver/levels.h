// At most K different budgets among the heads of a layer.
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
