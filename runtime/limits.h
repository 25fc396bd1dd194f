// The constraints that an engine puts on budgets beyond their sum, read from a table's metadata "constraints", and the
// rounding that respects them. Not part of the public API: kvb_budgets() and the solver of such tables use it.
//
// Everything is counted in units: single tokens, or pages of `block` tokens, where a head's last page may reach beyond
// T and is counted in full, as paged caches allocate it. A share s of T is ceil(s T / block) units as a lower limit and
// floor(s T / block) as an upper one, with 1e-6 tokens of grace, as 0.29 * 100 is less than 29 in doubles.
#pragma once
#include "kvbudget.h"
#include <stdbool.h>

#define KVB_LIMITS_GRACE 1e-6 // tokens

typedef struct kvb_limits {
    uint32_t n_layers, n_kv_heads; // L, G
    uint32_t block;                // tokens of a page, at least 1
    uint32_t levels;               // most different budgets within a layer; 0: any number
    uint32_t ranks;       // tensor-parallel ranks, at least 1; rank p has the heads p G/ranks .. of every layer
    bool by_layer;        // totals are fixed for each layer, not for the whole model
    double *least, *most; // [L, G] shares of T in 0 .. 1; least = 1: never evicted
    double *cap;          // [L] most that a layer keeps, as a share of its G T tokens
} kvb_limits;

// Allocates for L x G heads, with no limit set: 16 bytes each, so check L and G against the size of the data first. On
// failure *m is zero.
kvb_status kvb_limits_init(kvb_limits *m, uint32_t n_layers, uint32_t n_kv_heads, kvb_error *err);
void kvb_limits_free(kvb_limits *m);

// Reads the JSON object of the metadata, `name` being the file for messages: any of block, levels, ranks, by_layer,
// least, most (arrays of L G shares), layer_cap (array of L shares). Unknown keys are refused, because a constraint
// that is not understood cannot be respected. On failure *m is zero.
kvb_status kvb_limits_parse(kvb_limits *m, const char *text, uint32_t n_layers, uint32_t n_kv_heads, const char *name,
                            kvb_error *err);

// Fails with KVB_ARGUMENT if limits contradict each other, so that no budgets can meet them; the message names the head
// or layer and the numbers.
kvb_status kvb_limits_check(const kvb_limits *m, kvb_error *err);

// The number of units in T tokens; the limits of head h, in units; and the cap of one rank's part of layer l.
uint32_t kvb_limits_units(const kvb_limits *m, uint32_t n_tokens);
uint32_t kvb_limits_least(const kvb_limits *m, size_t head, uint32_t n_tokens);
uint32_t kvb_limits_most(const kvb_limits *m, size_t head, uint32_t n_tokens);
uint64_t kvb_limits_cap(const kvb_limits *m, uint32_t layer, uint32_t n_tokens);

// The tokens that head h should keep before rounding, 0 .. T.
typedef double kvb_ideal(const void *self, size_t head, uint32_t n_tokens);

// Rounds to whole tokens within all limits: keep [L, G]. The total is the number of whole units in the sum of the
// ideals (with ranks, the smallest rank's number times the number of ranks); lower limits may raise it, and upper
// limits or levels may lower it. It is handed out to layers and then to heads by largest remainder: all ideals are
// shifted by the same amount until the sums agree; ties go to the lower index. With levels, a layer's heads with equal
// ideals stay together; while there are more groups than levels, the two whose merging moves the ideals least are
// merged.
//   least_tokens  no head gets fewer, min(T, sink + window) for a strict runtime; at least 1
// Allocates nothing. Fails with KVB_UNSUPPORTED, with the numbers, if nothing fits at this T; keep is then undefined.
kvb_status kvb_limits_round(const kvb_limits *m, kvb_ideal *ideal, const void *self, uint32_t n_tokens,
                            uint32_t least_tokens, uint32_t *keep, kvb_error *err);
