// Uncertainty of losses that were measured on pairs of a few texts, with GSL's generators and statistics.
//
// Questions of one text are alike, so they are not independent draws. The bootstrap here has two stages (Davison and
// Hinkley 1997, 3.8): as many texts are drawn as there are, with replacement, and of each drawn text as many of its
// questions, with replacement. All methods are measured on the same draws, so their ratios vary less than they do.
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
    double value, low, high; // of the sample itself; of the central 95 % of the draws
} loss_interval;

enum { BOOTSTRAP_DRAWS = 2000 };

// mean [M]: each method's mean over the pairs; ratio [M]: this mean divided by that of method `base`, minus 1 (0 when
// that is 0). The same seed gives the same intervals. Errors: KVB_ARGUMENT, KVB_MEMORY.
kvb_status bootstrap_losses(const loss_sample *s, uint32_t base, uint64_t seed, loss_interval *mean,
                            loss_interval *ratio, kvb_error *err);

// Fills chosen[k] with k different numbers below n, ascending, from a generator that `seed` and `draw` make: what a
// learning curve leaves in.
kvb_status draw_subset(uint32_t *chosen, uint32_t k, uint32_t n, uint64_t seed, uint64_t draw, kvb_error *err);

// A head is not to be trusted at a ratio when the pairs disagree by more about what it should keep than it keeps:
// std > 1 - prune_ratio. Returns how many of the n heads are; flags [n] may be NULL.
uint32_t flag_heads(const double *prune_ratio, const double *std, uint32_t n, uint8_t *flags);
