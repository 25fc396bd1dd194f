// Means of a sweep over positions and texts, and how sure they are.
#pragma once
#include "evaluator/sweep.h"
#include "study/interval.h"

// One allocator at one ratio, over all texts.
typedef struct sweep_summary {
    uint32_t column;
    double ratio;
    interval kl;    // nats per token
    interval agree; // share of positions at which the likeliest token is that of the full cache
    interval nll;   // of the true next token, nats
    // kl divided by that of another allocator for the same metric and ratio, text by text; NaN without one:
    interval to_uniform, to_ada, to_published; // published: a table of the paper's kind, mean_ratio without shrinkage
    double full_nll;                           // of the full cache
    double loss;                               // evicted share of the oracle importance
    double output_error;                       // mean over layers and texts; NaN under a policy
    double looked;           // share of the context's entries that a policy attends to per step; NaN without one
    double effective;        // what was really pruned
    double bytes, allocated; // per text
    double seconds;          // per run
} sweep_summary;

// [columns, ratios] in the order of the sweep's first text; every cell must be done. The caller frees the
// array.
sweep_summary *sweep_summarize(const sweep *s, size_t *n);
