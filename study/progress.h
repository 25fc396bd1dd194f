// How far long work on a record has come: told to whoever runs it, who may also stop it.
#pragma once
#include <stdbool.h>

typedef struct study_progress {
    // Called after every pair; false: stop, which ends in KVB_INTERRUPTED. `to` is handed back.
    bool (*update)(void *to, double done, double total);
    void *to;
    double done, total; // pairs; set by the study
} study_progress;

// Nothing is done of `total` pairs. NULL: nobody is told.
void study_progress_begin(study_progress *p, double total);
// Another pair is done. Whether to go on.
bool study_progress_step(study_progress *p);

// Seconds of a clock that only goes on, to say how long solving took.
double study_seconds(void);
