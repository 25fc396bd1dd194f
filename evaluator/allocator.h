// Allocators decide how many tokens each KV head keeps: baselines, tables, the oracle in hindsight.
#pragma once
#include "evaluator/window_attention.h"
#include "profiler/model/model_config.h"
#include "runtime/kvbudget.h"
#include <stdbool.h>

typedef enum allocator_kind {
    ALLOCATOR_UNIFORM,
    ALLOCATOR_PYRAMID,
    ALLOCATOR_ADA,          // within a layer, kvpress's form
    ALLOCATOR_ADA_ORIGINAL, // within a layer, the authors' form
    ALLOCATOR_ADA_GLOBAL,   // over all layers
    ALLOCATOR_LAVA,         // over layers by the entropy of what is attended to, then within a layer
    ALLOCATOR_CAKE,         // over layers by how spread out and how variable attention is; uniform within a layer
    ALLOCATOR_TABLE,        // LU-KV, in whatever form the table was solved
    ALLOCATOR_PACKED,       // all heads alike in fewer bits: everything, or as many tokens as the bytes allow
    ALLOCATOR_ORACLE // order and budgets by the oracle importance of the continuation itself, which no method can know
} allocator_kind;

typedef struct allocator {
    allocator_kind kind;
    char label[64];     // shown in results: "uniform", "ada", "lukv"
    char identity[160]; // identifies it exactly: kind, parameters, hash of the file
    double beta, alpha;
    double tau1, tau2;     // CAKE's: its exponents are 1 / tau1 and 1 / tau2
    uint32_t window;       // PyramidKV's
    uint32_t keys, values; // ALLOCATOR_PACKED's bits of a number
    kvb_table *table;      // ALLOCATOR_TABLE; owned
    char *path;            // of the table; owned
    bool strict;           // a table's budgets never cut into sinks and window (kvb_budget_options)
} allocator;

typedef struct allocator_shape {
    uint32_t n_layers, n_kv_heads; // L, G
    const layer_set *bounded;      // layers that keep everything and are part of no total; NULL: none
    uint32_t head_dim;             // d; only ALLOCATOR_PACKED needs it
} allocator_shape;

// Parses `name[:parameter=value...]`: uniform, pyramid (beta 20, window 8), ada (alpha 0.2), ada-original, ada-global,
// lava, cake (tau1 1, tau2 1: the authors fit them to each model and size), packed (keys 4, values 4 bits), oracle.
// Errors list the known names. The caller frees with allocator_free, also after a failure.
kvb_status allocator_parse(allocator *out, const char *text, kvb_error *err);
// Opens a table, `FILE` or `LABEL=FILE` (if a file of that whole name exists, there is no label). With `:strict`
// appended its budgets never cut into sinks and window; without it they are kvpress's. Without a label it is named
// after how it was solved: kvbudget for `solve`'s default, lukv for the published way, then what differs from it:
// kvbudget-exact, lukv-layer, lukv-mean_loss, lukv-no_gap.
kvb_status allocator_open_table(allocator *out, const char *text, kvb_error *err);
void allocator_free(allocator *a);

// Whether the allocator reads the context's scores: AdaKV in every form, LAVa, CAKE and the oracle do.
bool allocator_needs_scores(const allocator *a);
// Whether heads are packed in formats, and not stored as floats.
bool allocator_has_formats(const allocator *a);
// Whether the allocator reads the attention of the context's last queries: LAVa and CAKE do.
bool allocator_needs_attention(const allocator *a);

// Computes the budgets keep [L*G] for a context of n_tokens at a pruned ratio below 1. `scores` [L, G, T] are the
// metric's (AdaKV, LAVa, CAKE) or the oracle importance (ALLOCATOR_ORACLE); `attention` is for LAVa and CAKE, NULL for
// others. Totals are rint((1 - ratio) L G T), except for tables (which round per layer, as kvpress does). Ratio 0 keeps
// everything. With formats the ratio is the share of a bfloat16 cache's bytes that is saved. If a model has bounded
// layers, L counts the other layers, and only these are pruned.
kvb_status allocator_budgets(const allocator *a, const allocator_shape *shape, double ratio, uint32_t n_tokens,
                             const float *scores, const window_attention *attention, uint32_t sink, uint32_t window,
                             uint32_t *keep, kvb_error *err);

// Writes to *formats how each head is stored, [L*G, 2] kvb_packing of keys and values, which the caller frees, or NULL
// if all are stored as floats.
kvb_status allocator_formats(const allocator *a, const allocator_shape *shape, double ratio, uint8_t **formats,
                             kvb_error *err);
