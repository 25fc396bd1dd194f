// Reads scores of attention heads from a file, for the allocators that need them (HeadKV, arXiv 2410.19258;
// DuoAttention).
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

// Reads L lines of H or G numbers (.tsv, as DuoAttention publishes them). Writes [L, H] when query_heads, else [L, G]:
// groups are averaged or repeated. Scores must be finite and >= 0. Errors name the file and the place.
kvb_status head_scores_read(const char *path, uint32_t n_layers, uint32_t n_heads, uint32_t n_kv_heads,
                            bool query_heads, float *out, kvb_error *err);
// The same from bytes; `path` is for messages.
kvb_status head_scores_parse(const void *data, size_t size, const char *path, uint32_t n_layers, uint32_t n_heads,
                             uint32_t n_kv_heads, bool query_heads, float *out, kvb_error *err);
