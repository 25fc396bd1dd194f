// The roundings of kvb_budgets(). Not part of the public API. None allocates or can fail; all write counts of 1 .. T.
#pragma once
#include "kvbudget.h"

// The prune ratios in use: (1 - weight) * below + weight * above. `below` is NULL for ratio 0, where all r are 0. With
// formats, bytes are mixed in place of tokens, and then divided by what a token costs in the nearest row's formats.
typedef struct kvb_mix {
    const double *below, *above; // [L, G] rows of the table
    // [L, G] what a token costs in these rows and in the nearest, as a share of bfloat16; NULL if no formats are mixed
    const double *cost_below, *cost_above, *cost;
    uint32_t row_below, row_above; // counted from 1, so in most tables they are per cents; 0: nothing is pruned
    double weight;
} kvb_mix;

// What head h should keep before rounding to tokens: (1 - r) T, computed as one double. This is a kvb_ideal; `mix`
// points to a kvb_mix.
double kvb_mix_ideal(const void *mix, size_t head, uint32_t n_tokens);

// KVB_ROUND_LAYER_LR for the n heads of one layer from first_head on; keep [n].
void kvb_round_layer(const kvb_mix *mix, size_t first_head, uint32_t n, uint32_t n_tokens, uint32_t *keep);
// KVB_ROUND_FLOOR and KVB_ROUND_GLOBAL_LR for all heads; keep [n_heads].
void kvb_round_floor(const kvb_mix *mix, size_t n_heads, uint32_t n_tokens, uint32_t *keep);
void kvb_round_global(const kvb_mix *mix, size_t n_heads, uint32_t n_tokens, uint32_t *keep);

// Raises every count to `floor_count`. What is missing is taken one by one from the count that is highest above the
// floor (tie: lower index).
void kvb_raise_to_floor(uint32_t *count, size_t n, uint32_t floor_count);

// Rounds keep [n_heads] to whole blocks, at least least_blocks for each head; the last block ends at n_tokens.
void kvb_round_blocks(uint32_t *keep, size_t n_heads, uint32_t n_tokens, uint32_t block, uint32_t least_blocks);
