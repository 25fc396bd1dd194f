// How many of the first and last tokens a metric should protect: a table's sinks and window, decided on the record.
#pragma once
#include "study/options.h"
#include "study/progress.h"
#include "study/selection.h"

enum { WINDOWS = 8, SINKS = 6, PROTECTIONS = WINDOWS + SINKS, PROTECTION_RATIOS = 3 };

// What sinks and a window lose: shares of all importance of a text, protected tokens included, so that they can be
// compared at equal memory; means over the texts.
typedef struct protection {
    uint32_t sink, window;
    double loss[PROTECTION_RATIOS]; // at 50, 80 and 90 % pruned; NAN: a head cannot hold so many at that ratio
    double score;                   // geometric mean of the losses
} protection;

typedef struct window_choice {
    protection each[PROTECTIONS]; // the metric's own first, then other windows, then other sinks of the best window
    uint32_t n, chosen;           // those that every text has room for; the one with the least score
    bool held_out;                // budgets are those of the other texts; false with one text: its own
} window_choice;

// Tries the windows 1, 4, 16, 32, 64, 128, 256 and the metric's own; then, where the options leave sinks to the record,
// 0, 1, 2, 4, 8 and 16 of them with the window that is best. Every text is judged under budgets that minimise the mean
// loss of the others. Errors: KVB_ARGUMENT no pair; those of reading; KVB_MEMORY; KVB_INTERRUPTED. progress may be
// NULL.
kvb_status window_choose(window_choice *out, const selection *from, const char *metric, const study_options *o,
                         study_progress *progress, kvb_error *err);
