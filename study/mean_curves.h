// The pairs' average loss curves as an array, for those who solve or draw for themselves.
#pragma once
#include "study/pairs.h"

// Writes .npy, float64 [L,G,T+1] with T the longest context: element b is the share of all oracle importance that the
// head loses when it keeps its best b of T tokens, protected ones included, averaged over the pairs as mean_loss does
// (solver/aggregate.h). Nothing is pulled together, so o->shrink has no say. Below the protected tokens a curve is
// flat. progress may be NULL. Errors: those of pairs_open() and pair_walk_next(); KVB_IO, KVB_MEMORY.
kvb_status mean_curves_write(const selection *from, const char *metric, const study_options *o, const char *path,
                             study_progress *progress, kvb_error *err);
