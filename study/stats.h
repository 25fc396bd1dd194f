// Uncertainty of losses that were measured on pairs of a few texts: stats/interval.h, a text being a group, since
// questions of one text are alike and no independent draws. All methods are measured on the same texts, so their ratios
// vary less than they do.
#pragma once
#include "runtime/kvbudget.h"
#include <stdint.h>

// Losses of M methods on P pairs; pairs of one text stand together.
typedef struct loss_sample {
    uint32_t n_methods, n_pairs, n_texts;
    const double *loss;    // [M, P]
    const uint32_t *first; // [n_texts + 1] first pair of each text; the last entry is P
} loss_sample;

typedef struct loss_interval {
    double value, low, high; // of the sample itself; 95 %; NaN for fewer than INTERVAL_GROUPS texts
} loss_interval;

// mean [M]: each method's mean over the pairs; ratio [M]: this mean divided by that of method `base`, minus 1 (0 when
// that is 0). Errors: KVB_ARGUMENT, KVB_MEMORY.
kvb_status loss_intervals(const loss_sample *s, uint32_t base, loss_interval *mean, loss_interval *ratio,
                          kvb_error *err);

// Fills chosen[k] with k different numbers below n, ascending, from a generator that `seed` and `draw` make: what a
// learning curve leaves in.
kvb_status draw_subset(uint32_t *chosen, uint32_t k, uint32_t n, uint64_t seed, uint64_t draw, kvb_error *err);

// A head is not to be trusted at a ratio when the pairs disagree by more about what it should keep than it keeps:
// std > 1 - prune_ratio. Returns how many of the n heads are; flags [n] may be NULL.
uint32_t flag_heads(const double *prune_ratio, const double *std, uint32_t n, uint8_t *flags);
