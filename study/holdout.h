// How well tables do on texts or questions that they were not made from: leave-one-out losses.
#pragma once
#include "study/interval.h"
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
    METHOD_OPTIMUM, // each question's own: no table for all questions can be better
    N_METHODS
};
extern const char *const holdout_methods[N_METHODS];

enum { LEVELS_MAX = 8, TRANSFER_MAX = 32 };

// A learning curve: mean losses of two kinds of tables on held-out texts, by how much they were made from.
typedef struct learning_curve {
    uint32_t n_levels, level[LEVELS_MAX]; // ascending: how many questions of each text, or how many texts
    double loss[LEVELS_MAX][2][ROWS];     // of mean_ratio and of the default; means over the pairs
} learning_curve;

typedef struct holdout {
    pair_set pairs;
    study_options options;
    bool by_question;
    uint64_t seed; // of draws of texts and questions
    uint32_t n_rows;
    double ratios[ROWS];
    uint32_t n_texts;                                       // contexts in use
    uint32_t n_pairs, *first;                               // first pair of each text; [n_texts + 1]
    size_t *selected;                                       // index of each text in the selection
    double *loss;                                           // [R, M, P]
    interval mean[ROWS][N_METHODS], ratio[ROWS][N_METHODS]; // ratio: to the paper's table, minus 1
    learning_curve questions, texts;                        // by text only
    double *transfer;          // [R, texts, texts] loss of the table of the first on the second; or NULL
    struct holdout_work *work; // sums and tables while it runs
} holdout;

// Prepares to leave out each text in turn, or each question. Only scope, hull, min_keep and protection of the options
// are used. Errors: those of pairs_open(); KVB_ARGUMENT for fewer than two texts or questions. The caller calls
// holdout_free, also after a failure.
kvb_status holdout_open(holdout *h, const selection *from, const char *metric, const study_options *o, bool by_question,
                        uint64_t seed, kvb_error *err);
kvb_status holdout_run(holdout *h, study_progress *progress, kvb_error *err);
void holdout_free(holdout *h);

int holdout_row(const holdout *h, int percent); // row of a ratio in per cent, or -1
// The largest change against the paper's table between 30 and 95 % pruned, and where.
double holdout_worst_change(const holdout *h, int method, int *percent);
// How much more the table of text `from` loses on text `to` than the table of `to`, which has seen it.
double holdout_regret(const holdout *h, int row, uint32_t from, uint32_t to);
const record_context_info *holdout_text(const holdout *h, uint32_t text);
