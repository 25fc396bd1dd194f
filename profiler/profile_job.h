// A profiling run that adds to a finished record: what of the calibration files the record has already, and what is
// left to do. Between the files of the profiling run; profile.h has what a caller needs.
#pragma once
#include "profiler/profile.h"

// Whether context `c` is scored by metric `i`: a recorded one by what the record lacks, and by the witness.
bool profile_scores_metric(const profile_job *job, const profile_context *c, size_t i);

// After a prefill of a context that o->grows has: the witness's scores [B,G,T], which this run has computed, must be
// the record's bit by bit, else this machine or program would add numbers of another kind (KVB_MISMATCH). `buffer`
// [B,G,T].
kvb_status profile_check_witness(const profile_job *job, const profile_options *o, const profile_context *c,
                                 const float *scores, float *buffer, kvb_error *err);
