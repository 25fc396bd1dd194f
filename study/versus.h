// Which budgets a table has at each ratio: its own, or others that lose less on texts that neither has seen.
#pragma once
#include "study/table.h"

typedef enum rival { RIVAL_NONE, RIVAL_UNIFORM, RIVAL_PUBLISHED, N_RIVALS } rival;
extern const char *const rival_names[N_RIVALS];

// What each loses on left-out texts under the table's own loss, mean over the pairs; and which is the best at a ratio.
typedef struct versus {
    double loss[N_RIVALS][ROWS]; // RIVAL_NONE: budgets that are made as the table is
    rival best[ROWS];
    bool compared; // there are two texts or more
} versus;

// Compares uniform budgets and the published ones (mean_ratio of importance) with the table's, each made without the
// text that judges it, and puts the best into the table's rows, whose losses it then states. The table was solved for
// the output loss and has no constraints.
kvb_status versus_choose(versus *v, study_table *t, study_progress *progress, kvb_error *err);
