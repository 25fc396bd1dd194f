// The tables of --holdout: what they are made from, and making them without the text, or the pair, that is held out.
#pragma once
#include "study/holdout.h"
#include "study/pair_sums.h"

// A table of one point of a learning curve, made for the text that is held out.
typedef struct holdout_entry {
    learning_curve *curve;
    uint32_t level, method;
    double weight; // 1 / tables at this point
    double *table; // [R, N]
} holdout_entry;

typedef struct holdout_work {
    solve_options options;
    pair_sums *texts;              // [n_texts]
    pair_sums *levels[LEVELS_MAX]; // [n_texts] the questions of each text that a level of the curve leaves in
    pair_sums rest;                // by question: the pair's text without it
    double *tables[N_METHODS];     // [R, N] made without the text, or the pair, that is held out
    double *own;                   // [n_texts, R, N] tables of single texts, for the transfer matrix
    holdout_entry *entries;        // of the learning curves
    size_t n_entries;
    uint32_t fitted; // text that tables and entries are made for; n_texts: none
    uint32_t *keep;  // [N] scratch
} holdout_work;

size_t holdout_cells(const holdout *h); // R N
// Room for everything; by text also for learning curves and transfer, where they fit. *h has its texts and ratios.
kvb_status holdout_work_init(holdout *h, kvb_error *err);
void holdout_work_free(holdout *h);

// Makes the tables for a pair of `text` where those of the pair before do not serve; p: its problem.
kvb_status holdout_fit_fold(holdout *h, problem *p, uint32_t text, kvb_error *err);
// The tables of single texts, when all pairs are summed up.
kvb_status holdout_fit_own(holdout *h, kvb_error *err);
