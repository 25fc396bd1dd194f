// A small part of a model with made-up weights, to see how fast this machine is with the model's own shapes before any
// weight is loaded.
#pragma once
#include "profiler/model/model.h"

// Layers at least, so that their own times can be told apart from what begins and ends a pass, and at most.
enum { REHEARSAL_LAYERS = 4, REHEARSAL_MOST_LAYERS = 8, REHEARSAL_WIDTH = 64 };

typedef struct rehearsal {
    model m;           // all its layers are like one of the original's; weights are held as that layer's would be
    uint32_t distinct; // layers that have weights of their own: all where these are small, so that they do not all stay
                       // in a cache, else 1
    void *bytes;       // what all its matrices are made of
} rehearsal;

// Like `layer` of m, with as large a vocabulary as makes the output matrix larger than a cache, or m's. Its numbers are
// of both signs and differ from token to token, so that experts share the tokens out. `narrow`: of width
// REHEARSAL_WIDTH and without experts, so that attention, oracle and scorers are nearly all that it does. m stays open
// and unchanged as long as this. KVB_MEMORY, and what a backend's open fails with; on failure *out is zero.
kvb_status rehearsal_open(rehearsal *out, const model *m, uint32_t layer, bool narrow, kvb_error *err);
void rehearsal_close(rehearsal *r); // leaves it zero; a zero one is allowed
