// Means over groups of values, and how sure they are: 95 % intervals.
//
// Values come in groups: positions of texts, questions of contexts. Those of one group resemble each other, so what
// counts as an observation is a group, and intervals say how a mean would move with other groups of the same kind. A
// percentile bootstrap over five groups covers the truth 80 times of 100 where it says 95, so Student's distribution
// stands in its place; docs/output.md has the coverage that was simulated. Fewer than INTERVAL_GROUPS groups say
// nothing that can be relied on: low and high are NaN.
#pragma once
#include <stdint.h>

typedef struct interval {
    double value, low, high;
} interval;

enum { INTERVAL_GROUPS = 5 };

typedef struct value_groups {
    const double *const *values; // [n_groups][counts[group]]
    const uint32_t *counts;      // each at least 1
    uint32_t n_groups;
} value_groups;

// The mean of all values; n - 1 degrees of freedom, the error by the jackknife over groups.
interval interval_mean(const value_groups *a);
// The same for values above 0 that spread over decades, such as KL: symmetric in the logarithm, n - 2 degrees. Where
// every value is 0, low and high are 0.
interval interval_positive(const value_groups *a);
// mean(a) / mean(b) of values >= 0 that belong together: the same value of the same group; b has a's counts. As
// interval_positive(). NaN where mean(b) is 0.
interval interval_ratio(const value_groups *a, const double *const *b);
// The mean of values in [0, 1], such as right answers: Wilson's interval for as many observations as the spread between
// groups leaves, at least one per group, so that "all right" does not look certain.
interval interval_share(const value_groups *a);
// mean(a) - mean(b) of such values that belong together. n - 1 degrees over groups; at least Agresti's and Min's
// interval for single values (Statistics in Medicine 24, 2005), which adds two that speak for neither, so that "all the
// same" does not look certain.
interval interval_share_difference(const value_groups *a, const double *const *b);

// ---- Losses of methods on the same pairs: a text is a group, since its questions are alike and no independent draws
// ----

// Losses of M methods on P pairs; pairs of one text stand together.
typedef struct loss_sample {
    uint32_t n_methods, n_pairs, n_texts; // at least 1 each
    const double *loss;                   // [M, P]
    const uint32_t *first;                // [n_texts + 1] first pair of each text; the last entry is P
} loss_sample;

// mean [M]: each method's mean over the pairs; ratio [M]: this mean divided by that of method `base`, minus 1 (0 when
// that is 0). All methods are measured on the same texts, so their ratios vary less than they do.
void loss_intervals(const loss_sample *s, uint32_t base, interval *mean, interval *ratio);

// A head is not to be trusted at a ratio when the pairs disagree by more about what it should keep than it keeps:
// std > 1 - prune_ratio. Returns how many of the n heads are; flags [n] may be NULL.
uint32_t flag_heads(const double *prune_ratio, const double *std, uint32_t n, uint8_t *flags);
