// What a run that is stopped keeps of the prefill it is in, so that --resume goes on with the next layer: the stretches
// of the forward pass and the scores of the layers that are done, in one file (formats/kept_file.h) beside the parts.
// Between the files of the profiling run.
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
    float **scores; // [n_metrics] of [B,G,T]; those that this context is not scored by are not looked at
    const record_writer *record;
    const profile_watch *watch; // NULL: nobody is told
} kept_prefill;

// Begins the context with what an earlier run has kept of it, and sets *layers to how many layers are done: 0 where
// there is nothing, and where it is of no use, which the watch is told: it is damaged, of another text, other metrics
// or another device, or this processor computes the first layer's keys with other bits. The context must be begun anew
// then. KVB_MEMORY.
kvb_status profile_take_kept(uint32_t *layers, const kept_prefill *k, kvb_error *err);

// After a stop, with its message: keeps the first `layers` layers, unless they would take more than half of what is
// free on the file system, in the place of fewer ones. Returns KVB_INTERRUPTED, whose message adds what was kept, or
// why nothing was.
kvb_status profile_keep(const kept_prefill *k, uint32_t layers, const kvb_error *stopped, kvb_error *err);

// What was kept is of no more use. A file that cannot be removed now goes with the parts.
void profile_drop_kept(const kept_prefill *k);
