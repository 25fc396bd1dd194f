// How well tables perform on texts that they were not made from: leave-one-out losses.
#pragma once
#include "study/interval.h"
#include "study/pair_sums.h"
#include "study/pairs.h"

// The tables that are compared.
enum {
    METHOD_UNIFORM,
    METHOD_PAPER,     // mean_ratio
    METHOD_MEAN_LOSS, // without shrinkage, then with 0.1, 0.2 and 0.3
    METHOD_SHRINK_1,
    METHOD_SHRINK_2,
    METHOD_SHRINK_3,
    METHOD_WORST,
    METHOD_CVAR,
    METHOD_OPTIMUM, // each question's own optimum: no table for all questions can be better
    N_METHODS
};
extern const char *const holdout_methods[N_METHODS];

typedef struct holdout {
    pair_set pairs;
    study_options options;
    uint32_t n_texts;                                       // contexts in use
    uint32_t n_pairs, *first;                               // first pair of each text; [n_texts + 1]
    size_t *selected;                                       // index of each text in the selection
    double *loss;                                           // [ROWS, M, P]
    interval mean[ROWS][N_METHODS], ratio[ROWS][N_METHODS]; // ratio: to the paper's table, minus 1
    // While it runs:
    pair_sums *texts;          // [n_texts]
    double *tables[N_METHODS]; // [ROWS, N] made without the text that is held out
    uint32_t fitted;           // the text that is held out; n_texts: none yet
} holdout;

// Prepares to leave out each text in turn. The options must have no limits, and a row for every per cent. Errors: those
// of pairs_open(); KVB_ARGUMENT for fewer than two texts. The caller calls holdout_free(), also after a failure.
kvb_status holdout_open(holdout *h, const selection *from, const char *metric, const study_options *o, kvb_error *err);
kvb_status holdout_run(holdout *h, study_progress *progress, kvb_error *err); // fills loss, mean and ratio
void holdout_free(holdout *h);

// Returns the largest change against the paper's table between 30 and 95 % pruned; *percent receives the ratio.
double holdout_worst_change(const holdout *h, int method, int *percent);
