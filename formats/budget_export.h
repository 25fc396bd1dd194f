// Budgets of one length and ratio in the files of other programs: one function per format. None of these formats can
// say all that a table says (other ratios and lengths, the metric, what is protected), so a table stays the thing to
// keep.
#pragma once
#include "runtime/kvbudget.h"

// What is written: whole tokens of every KV head.
typedef struct budget_export {
    const kvb_table *table;
    const char *table_path; // for notes inside of the files
    double ratio;
    uint32_t n_tokens;    // T
    uint32_t block;       // tokens of a page; 0 or 1: there are none
    const uint32_t *keep; // [L,G] what kvb_budgets() gave for them
} budget_export;

// All of them write whole or not at all. Errors: KVB_IO, KVB_ARGUMENT (an output that cannot be made), KVB_MEMORY, and
// what each says.

// DuoAttention (arXiv 2410.10819), and kvpress's DuoAttentionPress: the folder `path` with full_attention_heads.tsv, L
// lines of G shares keep / T, and config.json with sink_size, recent_size and head_compression_ratio. Heads of that
// method keep either everything or sinks and the latest tokens; the ratio is the share of heads that keep under half
// here, and these heads' mean is what recent_size gives them, at least the table's window.
kvb_status export_duo(const budget_export *b, const char *path, kvb_error *err);

// One number of tokens per layer, the mean of its heads, for kvpress's PerLayerCompressionPress and mlx-lm's
// RotatingKVCache: JSON with "tokens" [L], "compression_ratios" [L], which kvpress turns into just these tokens, "sink"
// and "effective_ratio". Counts are whole, and whole pages with `block`; what rounding takes from one layer another one
// gets, so the total stays. Layers without a budget keep all T tokens.
kvb_status export_per_layer(const budget_export *b, const char *path, kvb_error *err);

// Attention Matching (arXiv 2602.16284; github.com/adamzweiger/compaction, --precomputed-budget-path): JSON, every KV
// head's share of all tokens that are kept, {"L0H0": 0.014, ...}, which add up to 1. Layers without a budget are left
// out, as there.
kvb_status export_shares(const budget_export *b, const char *path, kvb_error *err);

// What varlen and paged attention kernels take, all int32: the folder `path` with lengths.npy [L,G], cu_seqlens.npy
// [L,G+1], and with pages page_indptr.npy [L,G+1] and block_table.npy [L,G,most pages of a head], page numbers of the
// layer's pool, -1 behind a head's last. KVB_UNSUPPORTED: more rows than int32 counts.
kvb_status export_varlen(const budget_export *b, const char *path, kvb_error *err);
