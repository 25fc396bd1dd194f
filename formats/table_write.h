// The table file: a safetensors container that Python, Rust and C++ read with the library that they already have.
// The reader is runtime/ (kvb_table_open); formats/README.md lists every byte.
#pragma once
#include "formats/rank_write.h"
#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

// R = n_rows ratios, L = n_layers, G = n_kv_heads; [R,L,G] in C order. Everything belongs to the caller.
typedef struct table_content {
    uint32_t n_rows, n_layers, n_kv_heads;
    const double *prune_ratio;     // [R,L,G] share of a head's T tokens that is evicted, in [0,1]
    const double *ratio;           // [R] global ratio of the row, (i+1)/100, ascending
    const double *std;             // [R,L,G] standard deviation of the prune ratio over the solved problems
    const double *loss;            // [R] mean over problems of greedy's loss / total mass
    const double *lower_bound;     // [R] the same for the certified bound D(lambda)
    const double *lambda;          // [R] slope at the boundary
    const double *table_loss;      // [R] mean relative loss of this table, rounded, on the calibration pairs
    const double *effective_ratio; // [R] mean over heads of prune_ratio
    const uint8_t *saturated;      // [R] 1: the floor was reached, the row evicts less than asked
    const rank_content *ranking;   // NULL: the metric is a plain one
    const cJSON *metadata;         // flat object of strings; must hold format = "kvbudget-table", format_version = "1"
} table_content;

// What an open table says, to be written again; the arrays stay the table's. *ranking receives that of a learned
// metric.
table_content table_content_of(const kvb_table *table, const cJSON *metadata, rank_content *ranking);

// Writes atomically, and nothing that kvb_table_open would refuse; equal content gives equal bytes. Checks: all numbers
// finite, prune_ratio in [0,1], ratio ascending in (0,1), saturated 0 or 1, metadata flat strings. Errors:
// KVB_ARGUMENT, KVB_NUMERIC, KVB_IO, KVB_MEMORY.
kvb_status table_write(const char *path, const table_content *t, kvb_error *err);

// The same bytes in memory: *out is malloc'd and belongs to the caller.
kvb_status table_serialize(unsigned char **out, size_t *size, const table_content *t, kvb_error *err);
