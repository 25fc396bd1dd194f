// Scores of attention heads that other methods were published with.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

// Reads .npy [L, H] or [L, G]; .tsv, L lines of H or G numbers (DuoAttention); or .json {"layer-head": [numbers] or
// number}, one entry per query or KV head, a list counting as its mean (KVCache-Factory). Writes [L, H] when
// query_heads, else [L, G]: groups are averaged or repeated. Scores must be finite and not negative. Errors name the
// file and the place.
kvb_status head_scores_read(const char *path, uint32_t n_layers, uint32_t n_heads, uint32_t n_kv_heads,
                            bool query_heads, float *out, kvb_error *err);
// The same from bytes; `path` tells the format by its ending and stands in messages.
kvb_status head_scores_parse(const void *data, size_t size, const char *path, uint32_t n_layers, uint32_t n_heads,
                             uint32_t n_kv_heads, bool query_heads, float *out, kvb_error *err);
