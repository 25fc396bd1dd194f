// Files of tables and of learned rankings: safetensors containers that Python, Rust and C++ read with the library that
// they already have. The reader is runtime/ (kvb_table_open, kvb_ranking_open); formats/README.md lists every byte.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

// ---- Learned rankings ----

// What is fitted, to be written; everything belongs to the caller.
typedef struct rank_content {
    uint32_t n_folds, n_layers, n_kv_heads, n_columns;
    const double *weights; // [1 + n_folds, L, G, P]
    const char *about;     // metadata "ranking", text of a JSON object, without its name where rank_name() makes one
} rank_content;

// What a ranking in memory was read from; lives as long as that.
rank_content rank_content_of(const kvb_ranking *r);

// The name of a ranking whose `about` does not say it yet: "learned:" and 12 digits of the SHA-256 of `about` and the
// weights, so that rankings that differ have names that differ. Returns `about` with the name as its last entry, to be
// freed; kvb_ranking_open() computes the hash again and compares.
char *rank_name(char name[24], const rank_content *r);

// Writes atomically, and nothing that kvb_ranking_open() would refuse. metadata: flat object of strings (model,
// record, ...), to which format, format_version and "ranking" are added. KVB_ARGUMENT, KVB_NUMERIC, KVB_IO, KVB_MEMORY.
kvb_status rank_write(const char *path, const rank_content *r, const cJSON *metadata, kvb_error *err);

// ---- Tables ----

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

// Writes atomically, and nothing that kvb_table_open would refuse: the bytes are opened first, and its errors are those
// here. Equal content gives equal bytes. Errors also: KVB_ARGUMENT (an array is NULL, an impossible shape), KVB_IO.
kvb_status table_write(const char *path, const table_content *t, kvb_error *err);

// The same bytes in memory: *out is malloc'd and belongs to the caller.
kvb_status table_serialize(unsigned char **out, size_t *size, const table_content *t, kvb_error *err);

// ---- Weights of texts ----
//
// The metadata "text_weights" of tables made with worst or cvar: JSON text, for every row one weight of each text. They
// are the multipliers that prove the row's bound (solver/robust.h).

// weight [n_rows, n_texts]. `name` is the file for messages; cap: the most that a text may weigh, of a sum of 1.
// KVB_FORMAT when the text is anything else than n_rows arrays of n_texts numbers from 0 to cap with the sum 1.
kvb_status table_weights_parse(double *weight, const char *text, uint32_t n_rows, uint32_t n_texts, double cap,
                               const char *name, kvb_error *err);

// The other way; to be freed with cJSON_free.
char *table_weights_print(const double *weight, uint32_t n_rows, uint32_t n_texts);
