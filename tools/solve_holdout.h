// kvbudget solve --holdout: how tables do on texts or questions that they were not made from. solve_holdout.c measures,
// holdout_results.c shows.
#pragma once
#include "solver/stats.h"
#include "solver/study.h"
#include "tools/solve_job.h"

// The tables that are compared.
enum {
    METHOD_UNIFORM,
    METHOD_PAPER,     // mean_ratio
    METHOD_MEAN_LOSS, // and with more and more shrinkage
    METHOD_SHRINK_1,
    METHOD_SHRINK_2,
    METHOD_SHRINK_3,
    METHOD_WORST,
    METHOD_CVAR,
    METHOD_OPTIMUM, // of every single question: what no static table can pass
    N_METHODS
};
extern const char *const holdout_methods[N_METHODS];

enum { LEVELS_MAX = 8, TRANSFER_MAX = 32 };

// A learning curve: mean losses of two tables on held-out texts, at every level of what they were made from.
typedef struct learning_curve {
    uint32_t n_levels, level[LEVELS_MAX]; // ascending: questions of each text, or texts
    double loss[LEVELS_MAX][2][ROWS];     // of mean_ratio and of the default, mean over pairs
} learning_curve;

typedef struct holdout {
    metric_job job; // first: actions get its address
    bool by_question;
    uint32_t n_rows;
    double ratios[ROWS];
    uint32_t n_texts;                                       // contexts in use
    uint32_t n_pairs, *first;                               // first pair of each text; [n_texts + 1]
    size_t *selected;                                       // index of each text in s->selected
    double *loss;                                           // [R, M, P]
    interval mean[ROWS][N_METHODS], ratio[ROWS][N_METHODS]; // ratio: to the paper's table
    learning_curve questions, texts;                        // by text only
    double *transfer; // [R, texts, texts] loss of the table of the first on the second; or NULL
} holdout;

// Prints, adds to the JSON list, draws to s->picture; as the command line asks for.
kvb_status show_holdout(const solve_command *s, const holdout *h, cJSON *list, kvb_error *err);
