// Means over positions and texts, and how sure they are.
#pragma once
#include "evaluator/sweep.h"

// 95 % intervals. With one text they cover its positions alone, and say nothing about other texts.
typedef struct interval {
    double value, low, high;
} interval;

enum { SUMMARY_RESAMPLES = 1000 };

// The mean of values[text][0..n-1] over all texts, with a bootstrap interval: texts are drawn with replacement, then positions within each
// (percentiles of SUMMARY_RESAMPLES means, seeded).
interval interval_mean(const double *const *values, uint32_t n_texts, uint32_t n, uint64_t seed);
// mean(a) / mean(b), where both are drawn together (a pair is the same position of the same text).
interval interval_ratio(const double *const *a, const double *const *b, uint32_t n_texts, uint32_t n, uint64_t seed);
// The mean of one value per text, with Student's interval; low and high are NaN for a single text.
interval interval_texts(const double *values, uint32_t n_texts);

// One allocator at one ratio, over all texts.
typedef struct sweep_summary {
    uint32_t column;
    double ratio;
    bool protect;
    interval kl;             // nats per token, bootstrap
    interval kl_texts;       // Student, over the texts' means
    interval agree;          // share of positions at which the likeliest token is that of the full cache
    interval nll;            // of the true next token, nats
    interval to_uniform;     // kl / the uniform allocator's for the same metric, ratio and protection; NaN without one
    double full_nll;         // of the full cache
    double loss;             // evicted share of the oracle importance
    double output_error;     // mean over layers and texts
    double effective;        // what was really pruned
    double bytes, allocated; // per text
    double seconds;          // per run
} sweep_summary;

// [columns, ratios, protection] in the order of the sweep's first text; every cell must be done. The caller frees the array.
kvb_status sweep_summarize(const sweep *s, uint64_t seed, sweep_summary **out, size_t *n, kvb_error *err);
