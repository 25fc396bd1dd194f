// The highest ratio that can be promised: a distribution-free guarantee from losses measured on texts that are drawn
// like the future texts.
//
// Learn then Test (Angelopoulos, Bates, Candes, Jordan, Lei 2021, arXiv 2110.01052) with fixed-sequence testing: ratios
// are tested from the lowest on, each at the full level, and the first that fails ends it. With probability 1 - error
// over the draw of the texts, the mean loss of future texts is below the limit at the returned ratio and at all ratios
// below it. Losses are in [0, 1]: an unbounded loss such as KL is first clipped at a cap and divided by it, and the
// promise is about the clipped loss. A text is one draw, however long: its tokens are not independent.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

// Returns the p-value of "the mean loss is above the limit", by betting (Waudby-Smith and Ramdas 2024, arXiv
// 2010.09686): 1 / the mean of prod(1 + b (limit - loss)) over a few fixed bets b in (0, 1 / (1 - limit)], at most 1.
// If the mean loss is above the limit, the product's mean is at most 1, and Markov's inequality gives the p-value. A
// small variance makes it smaller; the order of the texts does not matter. n >= 1 losses in [0, 1], limit in (0, 1).
// `times` > 0 counts every loss that many times, to see what more texts of the same kind would show.
double promise_p_value(const double *loss, uint32_t n, double limit, double times);

// Returns the smallest number of texts with which a promise is possible, if no text loses anything.
uint32_t promise_least_texts(double limit, double error);
// Estimates how many texts with losses like these are needed to pass. Returns 0 if their mean is not below the limit,
// or more than a million texts would be needed.
uint32_t promise_texts_needed(const double *loss, uint32_t n, double limit, double error);

// A condition on a ratio. A promise about several criteria is that all hold: a ratio is tested with the largest p.
typedef struct promise_criterion {
    double limit, cap;          // 0 < limit < cap, in the unit of the values; below 0 counts as 0, above cap as cap
    const double *values;       // [n_ratios, n_texts]
    const char *name, *measure; // what is limited, for people and as a column
} promise_criterion;

typedef struct promise_task {
    const promise_criterion *criteria;
    uint32_t n_criteria, n_ratios, n_texts; // ratios ascend
    double error;                           // 1 - confidence
} promise_task;

enum { PROMISE_KL, PROMISE_FLIPS, PROMISE_NLL, PROMISE_LIMITS };
// Makes the criteria of a task that has everything else, in out [PROMISE_LIMITS]: limits [PROMISE_LIMITS] of KL,
// changed tokens and NLL (NaN: none), of values [PROMISE_LIMITS, n_ratios, n_texts]. A text's KL or NLL counts as at
// most `cap` (0: five times the limit). Fails with KVB_ARGUMENT if so few texts could promise nothing even if they lost
// nothing.
kvb_status promise_ask(promise_task *t, promise_criterion *out, const double *limits, double cap, const double *values,
                       kvb_error *err);

// One ratio under one criterion: means over the texts, raw and clipped.
typedef struct promise_row {
    double mean, clipped, p;
} promise_row;

// Tests the ratios. rows [n_criteria, n_ratios] may be NULL; the first *n_passed ratios can be promised. Errors:
// KVB_ARGUMENT for impossible limits or caps, KVB_NUMERIC if a value is not finite.
kvb_status promise_find(const promise_task *task, promise_row *rows, uint32_t *n_passed, kvb_error *err);
