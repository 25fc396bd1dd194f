// Means over groups of values, and how sure they are: 95 % intervals.
#pragma once
#include <stdint.h>

typedef struct interval {
    double value, low, high;
} interval;

enum { INTERVAL_RESAMPLES = 1000 };

// Values that came in groups: positions of texts, questions of contexts. Those of one group resemble each other.
typedef struct value_groups {
    const double *const *values; // [n_groups][counts[group]]
    const uint32_t *counts;      // each at least 1
    uint32_t n_groups;
} value_groups;

// What is drawn again, seeded: groups with replacement, then values within each; percentiles of INTERVAL_RESAMPLES
// draws. With one group the interval covers that group's values alone and says nothing about others. `low` and `high`
// are NaN when memory is short.
interval interval_mean(const value_groups *a, uint64_t seed);
// mean(a) / mean(b), and mean(a) - mean(b), where both are drawn together (a pair is the same value of the same group);
// b has a's counts.
interval interval_ratio(const value_groups *a, const double *const *b, uint64_t seed);
interval interval_difference(const value_groups *a, const double *const *b, uint64_t seed);
// The mean of one value per group, with Student's interval; low and high are NaN for a single one.
interval interval_student(const double *values, uint32_t n);
