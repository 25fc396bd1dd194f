// Whether tables serve contexts of other lengths than they were made from: several records of the same contexts, cut to
// different lengths (profile --max-tokens). Losses of tables from every length, and from all of them, on every other,
// the text that is judged being left out; and the transfer matrix between single texts at single lengths.
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
    uint32_t fitted;                    // text that `tables` have not seen; n_texts: none yet
    double *tables[LENGTHS_MAX + 2];    // [R, N] from each length, from all, and from all but this one
} length_cut;

typedef struct lengths {
    study_options options;
    length_cut *cuts; // [n_cuts]
    uint32_t n_cuts, n_texts, n_pairs;
    size_t cells;                                    // R N
    double *own;                                     // [n_cuts, n_texts, R, N] table of one text at one length
    double loss[LENGTHS_MAX + 2][LENGTHS_MAX][ROWS]; // [from][on]: mean over the pairs of a record
    double *transfer; // [R, cuts x texts, cuts x texts] losses of single texts' tables; a text's lengths stand together
    char names[CUTS_MAX][24];
} lengths;

// paths [n]: the records, one for each length; wanted: contexts, questions and one metric, found in each of them. Of
// the options scope, hull, min_keep and protection count. Errors: those of selection_open() and pairs_open();
// KVB_ARGUMENT too few or too many records or contexts; KVB_MISMATCH records of other contexts, shapes or models. The
// caller frees, also after a failure.
kvb_status lengths_open(lengths *x, char *const *paths, size_t n, const selection_request *wanted,
                        const study_options *o, kvb_error *err);
void lengths_free(lengths *x);
// Three steps: sums up each record; makes the tables of single texts; judges each record. `at` counts records.
kvb_status lengths_read(lengths *x, uint32_t at, study_progress *progress, kvb_error *err);
kvb_status lengths_fit(lengths *x, kvb_error *err);
kvb_status lengths_judge(lengths *x, uint32_t at, study_progress *progress, kvb_error *err);

// What tables from elsewhere lose more than those from the length itself; from: a record, n_cuts for all, n_cuts + 1
// for all but `on`.
double lengths_change(const lengths *x, uint32_t from, uint32_t on, uint32_t row);
// What the table of one text at one length loses more on another than the other's own, which has seen it.
double lengths_regret(const lengths *x, uint32_t from, uint32_t to, uint32_t row);
const char *lengths_source(const lengths *x, uint32_t from);
