// Chooses each ratio's budgets: the table's own, or rival budgets that lose less on texts that neither has seen.
#pragma once
#include "study/table.h"

typedef enum rival { RIVAL_NONE, RIVAL_UNIFORM, RIVAL_PUBLISHED, N_RIVALS } rival;

// Each rival's loss on left-out texts, in the table's kind of loss, as a mean over the pairs, and the best per ratio.
typedef struct versus {
    double loss[N_RIVALS][ROWS]; // RIVAL_NONE: budgets made in the same way as the table's
    rival best[ROWS];
    bool compared; // there were at least two texts
} versus;

// Compares uniform budgets and the published ones (mean_ratio of importance) with the table's, each made without the
// text that judges it, puts the best into the table's rows, and updates the rows' losses. The table must have been
// solved for the output loss, without constraints.
kvb_status versus_choose(versus *v, study_table *t, study_progress *progress, kvb_error *err);
