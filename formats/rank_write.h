// The file of a learned ranking: a safetensors container with one tensor. The reader is runtime/ (kvb_ranking_open);
// formats/README.md lists what stands in it.
#pragma once
#include "formats/tensor_file.h"

// What is fitted, to be written; everything belongs to the caller.
typedef struct rank_content {
    uint32_t n_folds, n_layers, n_kv_heads, n_columns;
    const double *weights; // [1 + n_folds, L, G, P]
    const char *about;     // metadata "ranking", text of a JSON object, without its name where rank_name() makes one
} rank_content;

// The tensor "rank_weights", for a table's file too.
tensor_entry rank_tensor(const rank_content *r);
// What a ranking in memory was read from; lives as long as that.
rank_content rank_content_of(const kvb_ranking *r);

// The name of a ranking whose `about` does not say it yet: "learned:" and 12 digits of the SHA-256 of `about` and the
// weights, so that rankings that differ have names that differ. Returns `about` with the name as its last entry, to be
// freed; kvb_ranking_open() computes the hash again and compares.
char *rank_name(char name[24], const rank_content *r);

// Writes atomically, and nothing that kvb_ranking_open() would refuse. metadata: flat object of strings (model,
// record, ...), to which format, format_version and "ranking" are added. KVB_ARGUMENT, KVB_NUMERIC, KVB_IO, KVB_MEMORY.
kvb_status rank_write(const char *path, const rank_content *r, const cJSON *metadata, kvb_error *err);
