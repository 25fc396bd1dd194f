// How far greedy, and a table, are from the true optimum.
#pragma once
#include "study/gather.h"

// For one metric. Losses are shares of each problem's mass, means over the problems. Rows are those of the options.
typedef struct validation {
    study_options options;
    pair_set pairs;
    const double *table; // [R, L, G] prune ratios to compare, or NULL
    double greedy[ROWS], optimum[ROWS], bound[ROWS];
    double table_loss[ROWS]; // mean over the pairs
    uint32_t n_problems, unproved[ROWS];
    double greedy_seconds, exact_seconds;
    uint64_t work; // relaxations
} validation;

// The options' aggregate is AGGREGATE_MEAN_RATIO, where every pair is a problem, or AGGREGATE_MEAN_LOSS, where their
// average is one. The table and what the options point to must outlive the validation. Errors: those of pairs_open().
// The caller frees, also after a failure.
kvb_status validation_open(validation *v, const selection *from, const char *metric, const study_options *o,
                           const double *table, kvb_error *err);
kvb_status validation_run(validation *v, study_progress *progress, kvb_error *err); // fills losses, counts and seconds
void validation_free(validation *v);
