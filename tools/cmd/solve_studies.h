// What solve measures in place of a table: --holdout, --ablation, --lengths.
#pragma once
#include "tools/cmd/solve_line.h"
#include "tools/report/results.h"

typedef struct study_words {
    bool holdout, ablation, lengths;
    char *const *records; // [n_records] operands, for lengths
    size_t n_records;
} study_words;

bool study_given(const study_words *w);
// What the studies go together with. An exit code.
int study_check(const solve_line *l, const study_words *w);

// Each adds to the results, prints where no JSON is wanted, draws; as the command line asks for.
kvb_status run_study(const solve_line *l, const study_words *w, const selection *from, const char *metric, results *to,
                     kvb_error *err);
