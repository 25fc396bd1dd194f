// How many first and last tokens a table should protect (its sinks and window), chosen by what the record says is lost.
#pragma once
#include "study/options.h"
#include "study/progress.h"
#include "study/selection.h"

enum { WINDOWS = 8, SINKS = 6, PROTECTIONS = WINDOWS + SINKS, PROTECTION_RATIOS = 3 };

// One choice of sinks and window, and what it loses: the mean over the texts of the share of a text's whole importance,
// protected tokens included. So choices are compared at equal memory.
typedef struct protection {
    uint32_t sink, window;
    double loss[PROTECTION_RATIOS]; // at 50, 80 and 90 % pruned; NAN: heads have no room for it at that ratio
    double score;                   // geometric mean of the losses
} protection;

typedef struct window_choice {
    protection each[PROTECTIONS]; // the metric's own first, then other windows, then the best window with other sinks
    uint32_t n, chosen; // n: choices that every text has room for; chosen: index of the one with the least score
    bool held_out;      // each text was judged under budgets of the others; false with one text
} window_choice;

// Tries windows of 1, 4, 16, 32, 64, 128 and 256 tokens and the metric's own. Then, unless the options say how many
// sinks there are, tries 0, 1, 2, 4, 8 and 16 sinks with the best window. Each text is judged under budgets that
// minimise the mean loss of the other texts. progress may be NULL. Errors: KVB_ARGUMENT when there is no pair; those of
// reading; KVB_MEMORY; KVB_INTERRUPTED.
kvb_status window_choose(window_choice *out, const selection *from, const char *metric, const study_options *o,
                         study_progress *progress, kvb_error *err);
