// Writes budgets of one length and ratio in the file formats of other programs, one function per format. None of these
// formats holds all that a table does (other ratios and lengths, the metric, protected tokens), so keep the table.
#pragma once
#include "runtime/kvbudget.h"

// What is written: whole tokens of every KV head.
typedef struct budget_export {
    const kvb_table *table;
    const char *table_path; // for notes inside the files
    double ratio;
    uint32_t n_tokens;    // T
    uint32_t block;       // tokens of a page; 0 or 1: no pages
    const uint32_t *keep; // [L,G] what kvb_budgets() gave for them
} budget_export;

// All of them write atomically. Errors: KVB_IO, KVB_ARGUMENT (the output cannot be made), KVB_MEMORY, and those named
// at each function.

// DuoAttention (arXiv 2410.10819), and kvpress's DuoAttentionPress: the folder `path` with full_attention_heads.tsv, L
// lines of G shares keep / T, and config.json with sink_size, recent_size and head_compression_ratio. In that method a
// head keeps either everything, or sinks and the latest tokens. So the ratio is the share of heads that keep less than
// half of T in the table, and recent_size gives these heads the table's mean, but at least its window.
kvb_status export_duo(const budget_export *b, const char *path, kvb_error *err);

// One number of tokens per layer, the mean of its heads, for kvpress's PerLayerCompressionPress and mlx-lm's
// RotatingKVCache: JSON with "tokens" [L], "compression_ratios" [L], which kvpress turns into exactly these counts,
// "sink" and "effective_ratio". Counts are whole tokens, or whole pages with `block`; what rounding takes from one
// layer goes to another, so the total is kept. Layers without a budget keep all T tokens.
kvb_status export_per_layer(const budget_export *b, const char *path, kvb_error *err);

// Attention Matching (arXiv 2602.16284; github.com/adamzweiger/compaction, --precomputed-budget-path): JSON, every KV
// head's share of all tokens that are kept, {"L0H0": 0.014, ...}, which add up to 1. Layers without a budget are left
// out, as they are in that program.
kvb_status export_shares(const budget_export *b, const char *path, kvb_error *err);

// The arrays that varlen and paged attention kernels take, all int32: the folder `path` with lengths.npy [L,G],
// cu_seqlens.npy [L,G+1], and with pages page_indptr.npy [L,G+1] and block_table.npy [L,G,most pages of a head], page
// numbers in the layer's pool, -1 after a head's last page. KVB_UNSUPPORTED if an int32 cannot count the rows.
kvb_status export_varlen(const budget_export *b, const char *path, kvb_error *err);
