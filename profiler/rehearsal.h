// A small part of a model with constants for weights, to see how fast this machine is with the model's own shapes
// before any weight is loaded.
#pragma once
#include "profiler/model.h"

typedef struct rehearsal {
    model m;     // two layers, both like one of the original's; its weights are held as that layer's would be
    void *bytes; // what all its matrices are made of
} rehearsal;

enum { REHEARSAL_VOCABULARY = 4096, REHEARSAL_WIDTH = 64 };

// Like `layer` of m, with a vocabulary of at most REHEARSAL_VOCABULARY. `narrow`: of width REHEARSAL_WIDTH and without
// experts, so that attention, oracle and scorers are nearly all that it does. m stays open and unchanged as long as
// this. KVB_MEMORY, and what a backend's open fails with; on failure *out is zero.
kvb_status rehearsal_open(rehearsal *out, const model *m, uint32_t layer, bool narrow, kvb_error *err);
void rehearsal_close(rehearsal *r); // leaves it zero; a zero one is allowed
