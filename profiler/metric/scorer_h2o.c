// H2O (arXiv 2306.14048; methods.md 3.7): the attention that a token got from all queries, its column sum.
//
//     c[g,j] = mean over h in g of sum over i >= j of A[h,i,j]
//     s = c                         h2o: as KVCache-Factory, the recent window is protected
//     s = c / (T - j)               h2o:kvpress: mean over the queries that can see j (its ObservedAttentionPress)
//     half of b by c, half recent   h2o:half: as published; depends on the budget
//
// Early tokens are seen by more queries, so the raw sum prefers them.
#include "profiler/metric/scorer_parts.h"
#include <float.h>
#include <string.h>

typedef struct h2o_settings {
    uint32_t window;
} h2o_settings;

static kvb_status score_h2o(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, G = view->n_kv_heads, group = view->n_heads / G;
    bool mean = m->kind == &scorer_h2o_kvpress;
    for (uint32_t g = 0; g < G; g++) {
        float *line = s + (size_t)g * T;
        uint32_t end = key_position(view, g, T - 1) + 1; // the number of queries so far
        memset(line, 0, T * sizeof *line);
        for (uint32_t h = g * group; h < (g + 1) * group; h++)
            for (uint32_t j = 0; j < T; j++) line[j] += view->column_sums[(size_t)h * T + j];
        for (uint32_t j = 0; j < T; j++)
            line[j] /= (float)group * (mean ? (float)(end - key_position(view, g, j)) : 1.0f);
    }
    return KVB_OK;
}

// Ranks the recent half first; if the budget is odd, the heavy hitters get one token more.
static kvb_status rank_half(const metric *m, const float *first, float *s, uint32_t T, uint32_t budget, kvb_error *err)
{
    uint32_t recent = budget / 2 < T ? budget / 2 : T;
    for (uint32_t j = T - recent; j < T; j++) s[j] = FLT_MAX;
    return KVB_OK;
}

#define FORMULA "s[g,j] = mean over h in g of sum over all queries i >= j of A[h,i,j]"

const scorer scorer_h2o = {
    .spec = {.name = "h2o",
             .parameters = {SPEC(h2o_settings, window, 32, 1, 65536, "recent tokens that are always kept")}},
    .summary = "attention summed over all queries, recent window protected",
    .source = "H2O, arXiv 2306.14048; as KVCache-Factory does it (there window 8)",
    .formula = FORMULA,
    .needs = VIEW_COLUMN_SUMS,
    .protect_sink = 4,
    .score = score_h2o,
};

const scorer scorer_h2o_kvpress = {
    .spec = {"h2o", "kvpress", {{NULL}}, NULL},
    .summary = "attention averaged over the queries that can see a token",
    .source = "H2O, arXiv 2306.14048; as kvpress's ObservedAttentionPress",
    .formula = FORMULA " / (T - j)",
    .needs = VIEW_COLUMN_SUMS,
    .protect_sink = 4,
    .protect_window = 1,
    .score = score_h2o,
    .press = "ObservedAttentionPress",
    .press_warning = "load the model with attn_implementation=\"eager\": this press reads the attention itself",
};

const scorer scorer_h2o_half = {
    .spec = {"h2o", "half", {{NULL}}, NULL},
    .summary = "half of the budget by summed attention, half the most recent tokens; not for profiling",
    .source = "H2O, arXiv 2306.14048, as published",
    .formula = FORMULA ";\nkept: the floor(b/2) most recent tokens and the best of the others",
    .needs = VIEW_COLUMN_SUMS,
    .protect_sink = 0,
    .protect_window = 0,
    .score = score_h2o,
    .why_not_nested = "half of every budget are the most recent tokens; h2o and h2o:kvpress rank alike for all budgets",
    .rank = rank_half,
};
