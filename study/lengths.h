// How well tables do on contexts of another length than they were made from. It takes several records of the same
// contexts, each cut to another length (profile --max-tokens). Tables are made from each length, from all lengths, and
// from all but one, and are judged on every length, always on a text that was left out. It also makes the transfer
// matrix: the table of one text at one length, judged on every other text and length.
#pragma once
#include "study/pair_sums.h"
#include "study/pairs.h"

enum { LENGTHS_MAX = 8, LENGTH_TEXTS_MAX = 16, CUTS_MAX = LENGTHS_MAX * LENGTH_TEXTS_MAX };

// One record: all texts at one length.
typedef struct length_cut {
    selection from;
    pair_set pairs;
    uint32_t tokens; // of its longest context
    char name[16];
    // While it runs:
    pair_sums *texts;                   // [n_texts]
    uint32_t n_pairs[LENGTH_TEXTS_MAX]; // of each text
    uint32_t fitted;                    // the text that was left out of `tables`; n_texts: none yet
    double *tables[LENGTHS_MAX + 2];    // [R, N] from each length, from all, and from all but this one
} length_cut;

typedef struct lengths {
    study_options options;
    length_cut *cuts; // [n_cuts]
    uint32_t n_cuts, n_texts, n_pairs;
    size_t cells;                                    // R N
    double *own;                                     // [n_cuts, n_texts, R, N] table of one text at one length
    double loss[LENGTHS_MAX + 2][LENGTHS_MAX][ROWS]; // [from][on]: mean over the pairs of a record
    double *transfer; // [R, cuts x texts, cuts x texts] losses of single texts' tables; a text's lengths are adjacent
    char names[CUTS_MAX][24];
} lengths;

// Opens one record per length, paths [n], and finds the wanted contexts, questions and metric (one) in each. Only
// scope, hull, min_keep and protection of the options are used. Errors: those of selection_open() and pairs_open();
// KVB_ARGUMENT for too few or too many records or contexts; KVB_MISMATCH when records differ in contexts, shape or
// model. The caller calls lengths_free, also after a failure.
kvb_status lengths_open(lengths *x, char *const *paths, size_t n, const selection_request *wanted,
                        const study_options *o, kvb_error *err);
void lengths_free(lengths *x);
// The three steps, in this order: read each record `at`; make the tables of single texts; judge each record `at`.
kvb_status lengths_read(lengths *x, uint32_t at, study_progress *progress, kvb_error *err);
kvb_status lengths_fit(lengths *x, kvb_error *err);
kvb_status lengths_judge(lengths *x, uint32_t at, study_progress *progress, kvb_error *err);

// How much more tables from elsewhere lose on a length than tables from that length, as a share. `from` is a record, or
// n_cuts for all records, or n_cuts + 1 for all but `on`.
double lengths_change(const lengths *x, uint32_t from, uint32_t on, uint32_t row);
// How much more the table of one text at one length loses on another one than that one's own table, which has seen it.
double lengths_regret(const lengths *x, uint32_t from, uint32_t to, uint32_t row);
const char *lengths_source(const lengths *x, uint32_t from);
