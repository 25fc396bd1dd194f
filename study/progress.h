// Progress of long work on a record, reported to the caller, who may also stop it.
#pragma once
#include <stdbool.h>

typedef struct study_progress {
    // Called after every pair with `to`; returns false to stop, and the work then ends with KVB_INTERRUPTED.
    bool (*update)(void *to, double done, double total);
    void *to;
    double done, total; // pairs; set by the study
} study_progress;

// Begins work on `total` pairs. `p` may be NULL.
void study_progress_begin(study_progress *p, double total);
// Reports that another pair is done. Returns false if the work must stop.
bool study_progress_step(study_progress *p);

// Returns the seconds of a monotonic clock, for timing.
double study_seconds(void);
