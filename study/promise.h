// The highest ratio that can be promised: a guarantee without assumptions about distributions, from losses that were
// measured on texts which are drawn as those to come will be.
//
// Learn then Test (Angelopoulos, Bates, Candes, Jordan, Lei 2021, arXiv 2110.01052) with fixed-sequence testing: ratios
// are tested from the lowest on, each at the full level, and the first that fails ends it. With probability 1 - error
// over the draw of the texts, the mean loss of texts to come is below the limit at the ratio that is returned, and at
// all below it. Losses lie in [0, 1]: what is unbounded, as KL, is clipped at a cap and divided by it beforehand, and
// the promise is about the clipped loss. A text is one draw, however long: its tokens are not independent.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

// p-value of "the mean loss is above the limit", by betting (Waudby-Smith and Ramdas 2024, arXiv 2010.09686): 1 / the
// mean of prod(1 + b (limit - loss)) over a few fixed bets b in (0, 1 / (1 - limit)]. The product's mean is at most 1
// when the mean loss is above the limit (Markov's inequality does the rest). Gains from a small variance; the order of
// the texts does not matter. n >= 1 losses in [0, 1], limit in (0, 1). `times` >= 1 counts every loss so often: what as
// many texts of the same kind would show.
double promise_p_value(const double *loss, uint32_t n, double limit, double times);

// The fewest texts that could promise anything, if none lost anything at all.
uint32_t promise_least_texts(double limit, double error);
// About how many texts with the losses of these it takes to pass; 0: their mean is not below the limit, or over a
// million would be needed.
uint32_t promise_texts_needed(const double *loss, uint32_t n, double limit, double error);

// What must hold of a ratio. A promise about several is one that all hold at once: a ratio passes with the largest p.
typedef struct promise_criterion {
    double limit, cap;    // 0 < limit < cap, in the unit of the values; below 0 counts as 0, above cap as cap
    const double *values; // [n_ratios, n_texts]
} promise_criterion;

typedef struct promise_task {
    const promise_criterion *criteria;
    uint32_t n_criteria, n_ratios, n_texts; // ratios ascend
    double error;                           // 1 - confidence
} promise_task;

// One ratio under one criterion: means over the texts, raw and clipped.
typedef struct promise_row {
    double mean, clipped, p;
} promise_row;

// rows [n_criteria, n_ratios] (NULL: not wanted); *n_passed leading ratios can be promised, 0: none. Errors:
// KVB_ARGUMENT limits or caps that cannot be, KVB_NUMERIC a value that is not finite.
kvb_status promise_find(const promise_task *task, promise_row *rows, uint32_t *n_passed, kvb_error *err);
