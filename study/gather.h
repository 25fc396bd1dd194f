// Aggregation: combines the curves of many pairs into one problem: the average over all pairs (mean_loss), or one
// average per text (worst, cvar). mean_ratio solves every pair by itself and gathers nothing.
#pragma once
#include "study/pairs.h"

typedef struct gathered {
    aggregation how;
    loss_mean all;    // with AGGREGATE_MEAN_LOSS: on the grid of the longest context
    loss_mean *texts; // [n_texts] with AGGREGATE_TAIL: in the order of the selection, on a coarse grid
    size_t n_texts;
} gathered;

void gather_init(gathered *g, const pair_set *pairs, aggregation how);
void gather_free(gathered *g);
// Adds a pair of the k-th context.
kvb_status gather_add(gathered *g, size_t k, const loss_curves *c, kvb_error *err);
// Call after the last pair. gather_average() averages, leaving out texts without a pair; gather_pull() then shrinks the
// curves towards their mean (loss_curves_shrink). gather_finish() does both.
void gather_average(gathered *g);
void gather_pull(gathered *g, double shrink);
void gather_finish(gathered *g, double shrink);
