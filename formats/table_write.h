// Writes tables and learned rankings: safetensors files, which Python, Rust and C++ read with existing libraries. The
// reader is runtime/ (kvb_table_open, kvb_ranking_open); formats/README.md lists every byte.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

// A fitted ranking to be written; everything belongs to the caller.
typedef struct rank_content {
    uint32_t n_folds, n_layers, n_kv_heads, n_columns;
    const double *weights; // [1 + n_folds, L, G, P]
    const char *about;     // metadata "ranking", text of a JSON object, without its name where rank_name() makes one
} rank_content;

// Returns the content of a ranking in memory, to be written again; valid as long as the ranking.
rank_content rank_content_of(const kvb_ranking *r);

// Names a ranking whose `about` has no name yet: "learned:" and 12 digits of the SHA-256 of `about` and the weights, so
// that different rankings have different names. Returns `about` with the name as its last entry; the caller frees it.
// kvb_ranking_open() computes the hash again and compares.
char *rank_name(char name[24], const rank_content *r);

// Writes a ranking atomically, and refuses what kvb_ranking_open() would refuse. metadata: flat object of strings
// (model, record, ...), to which format, format_version and "ranking" are added. KVB_ARGUMENT, KVB_NUMERIC, KVB_IO,
// KVB_MEMORY.
kvb_status rank_write(const char *path, const rank_content *r, const cJSON *metadata, kvb_error *err);

// R = n_rows ratios, L = n_layers, G = n_kv_heads; [R,L,G] in C order. Everything belongs to the caller.
typedef struct table_content {
    uint32_t n_rows, n_layers, n_kv_heads;
    const double *prune_ratio;     // [R,L,G] share of a head's T tokens that is evicted, in [0,1]
    const double *ratio;           // [R] global ratio of the row, ascending; (i+1)/100 with 99 rows
    const double *std;             // [R,L,G] standard deviation of the prune ratio over the solved problems
    const double *loss;            // [R] mean over problems of greedy's loss / total mass
    const double *lower_bound;     // [R] the same for the certified bound D(lambda)
    const double *lambda;          // [R] slope at the boundary
    const double *table_loss;      // [R] mean relative loss of this table, rounded, on the calibration pairs
    const double *effective_ratio; // [R] mean over heads of prune_ratio
    const uint8_t *saturated;      // [R] 1: the floor was reached, the row evicts less than asked
    const uint8_t *formats;        // [R,L,G,2] kvb_packing of keys and values, in version 2; NULL: version 1
    const rank_content *ranking;   // NULL: the metric is a plain one
    const cJSON *metadata; // flat object of strings; must hold format = "kvbudget-table", format_version = "1" or "2"
} table_content;

// Returns the content of an open table, to be written again; the arrays still belong to the table. If its metric is
// learned, *ranking receives the ranking.
table_content table_content_of(const kvb_table *table, const cJSON *metadata, rank_content *ranking);

// Writes a table atomically. The bytes are first opened with kvb_table_open_memory(), whose errors this returns, so it
// never writes a table that cannot be read. Equal content gives equal bytes. Other errors: KVB_ARGUMENT (an array is
// NULL, an impossible shape), KVB_IO.
kvb_status table_write(const char *path, const table_content *t, kvb_error *err);

// The same bytes in memory: *out is malloc'd and belongs to the caller.
kvb_status table_serialize(unsigned char **out, size_t *size, const table_content *t, kvb_error *err);

// The metadata "text_weights" of tables made with worst or cvar: JSON text with one weight per row and text. These
// weights are the multipliers that prove the row's bound (solver/robust.h).

// Parses weights into weight [n_rows, n_texts]. `name` is the file, for messages; `cap` is the largest weight a text
// may have. Fails with KVB_FORMAT unless the text is n_rows arrays of n_texts numbers from 0 to cap that sum to 1.
kvb_status table_weights_parse(double *weight, const char *text, uint32_t n_rows, uint32_t n_texts, double cap,
                               const char *name, kvb_error *err);

// Prints weights as that text; the caller frees it with cJSON_free.
char *table_weights_print(const double *weight, uint32_t n_rows, uint32_t n_texts);
