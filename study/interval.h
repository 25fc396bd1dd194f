// Means over groups of values, with 95 % confidence intervals.
// Values come in groups: positions of texts, questions of contexts. Values of one group resemble each other, so a group
// counts as one observation, and an interval says how the mean would vary with other groups of the same kind. A
// percentile bootstrap over five groups covers the truth 80 times out of 100 where it claims 95, so Student's
// distribution is used instead; docs/output.md has the simulated coverage. With fewer than INTERVAL_GROUPS groups no
// interval would be reliable: low and high are NaN.
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

// Returns the mean of all values, with the jackknife error over the n groups and n - 1 degrees of freedom.
interval interval_mean(const value_groups *a);
// The same for positive values that range over orders of magnitude, such as KL: the interval is symmetric in the
// logarithm and has n - 2 degrees of freedom. If every value is 0, low and high are 0.
interval interval_positive(const value_groups *a);
// Returns mean(a) / mean(b) of paired values >= 0; b has a's groups and counts. The interval is made as in
// interval_positive(). The value is NaN if mean(b) is 0.
interval interval_ratio(const value_groups *a, const double *const *b);
// Returns the mean of values in [0, 1], such as right answers, with Wilson's interval for as many observations as the
// spread between groups suggests, at least one per group, so that "all right" does not look certain.
interval interval_share(const value_groups *a);
// Returns mean(a) - mean(b) of such values, paired. The interval has n - 1 degrees of freedom and is never narrower
// than Agresti and Min's for single values (Statistics in Medicine 24, 2005), which adds two neutral observations, so
// that "all the same" does not look certain.
interval interval_share_difference(const value_groups *a, const double *const *b);

// Losses of M methods on P pairs; pairs of one text are adjacent.
typedef struct loss_sample {
    uint32_t n_methods, n_pairs, n_texts; // at least 1 each
    const double *loss;                   // [M, P]
    const uint32_t *first;                // [n_texts + 1] first pair of each text; the last entry is P
} loss_sample;

// Fills mean [M], each method's mean over the pairs, and ratio [M], this mean divided by that of method `base`, minus 1
// (0 if the latter is 0). All methods are measured on the same texts, so ratios vary less than means.
void loss_intervals(const loss_sample *s, uint32_t base, interval *mean, interval *ratio);

// Flags heads whose budget is unreliable: the pairs disagree about what the head should keep by more than it keeps, std
// > 1 - prune_ratio. Returns how many of the n heads are flagged; flags [n] may be NULL.
uint32_t flag_heads(const double *prune_ratio, const double *std, uint32_t n, uint8_t *flags);
