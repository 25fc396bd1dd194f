// What a stopped run saves of the current prefill, so that --resume continues with the next layer: the stretches of the
// forward pass and the scores of the finished layers, in one file (formats/kept_file.h) next to the parts. Internal to
// the profiling run.
#pragma once
#include "profiler/model/forward.h"
#include "profiler/profile.h"

// The prefill of one context.
typedef struct kept_prefill {
    const model *m;
    const profile_job *job;
    const profile_options *o;
    const profile_context *c;
    forward *f;
    float **scores; // [n_metrics] of [B,G,T]; metrics that do not score this context are skipped
    const record_writer *record;
    const profile_watch *watch; // NULL: none
} kept_prefill;

// Restores what an earlier run saved of the context, and sets *layers to the number of finished layers. That is 0 if
// there is nothing, or if the file cannot be used, which the watch is told: it is damaged, or belongs to another text,
// other metrics or another device, or this processor computes different bits for the first layer's keys. The caller
// must then begin the context again. KVB_MEMORY.
kvb_status profile_take_kept(uint32_t *layers, const kept_prefill *k, kvb_error *err);

// Call after a stop, with its error: saves the first `layers` layers, unless they need more than half of the free space
// of the file system; replaces a file with fewer layers. Returns KVB_INTERRUPTED with a message that adds what was
// saved, or why nothing was.
kvb_status profile_keep(const kept_prefill *k, uint32_t layers, const kvb_error *stopped, kvb_error *err);

// Removes the saved file, which is no longer needed. If that fails, it is removed later with the parts.
void profile_drop_kept(const kept_prefill *k);
