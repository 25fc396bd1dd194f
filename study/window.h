// How many of the last tokens a metric should protect: a table's window, decided on the record.
#pragma once
#include "study/options.h"
#include "study/progress.h"
#include "study/selection.h"

enum { WINDOWS = 8, WINDOW_RATIOS = 3 };

// What each candidate loses: shares of all importance of a text, protected tokens included, so that windows can be
// compared at equal memory; means over the texts, under budgets that are best for the text itself.
typedef struct window_choice {
    uint32_t window[WINDOWS];
    double loss[WINDOWS][WINDOW_RATIOS]; // at 50, 80 and 90 % pruned; NAN: a head cannot hold so many at that ratio
    double score[WINDOWS];               // geometric mean of the losses
    uint32_t n, chosen;                  // candidates that every text has room for; the one with the least score
    uint32_t recorded;                   // the window that the metric has by itself, one of them
} window_choice;

// Tries 1, 4, 16, 32, 64, 128, 256 and the metric's own, with the options' sinks. Errors: KVB_ARGUMENT no pair; those
// of reading; KVB_MEMORY; KVB_INTERRUPTED. progress may be NULL.
kvb_status window_choose(window_choice *out, const selection *from, const char *metric, const study_options *o,
                         study_progress *progress, kvb_error *err);
