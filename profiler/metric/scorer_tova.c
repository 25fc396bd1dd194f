// TOVA (arXiv 2401.06104; methods.md 3.7): the attention of the last query alone.
//
//     s[g,j] = mean over all H heads of A[h,T-1,j]    scope=layer: one row for all KV heads, as TOVA and kvpress do
//     s[g,j] = mean over h in g of A[h,T-1,j]         scope=group: KeyDiff's baseline
#include "profiler/metric/scorer_parts.h"
#include <stdlib.h>
#include <string.h>

typedef enum tova_scope { SCOPE_OF_LAYER, SCOPE_OF_GROUP } tova_scope;

typedef struct tova_settings {
    tova_scope scope;
} tova_settings;

static bool whole_layer(const metric *m)
{
    const tova_settings *set = metric_settings(m);
    return set->scope == SCOPE_OF_LAYER;
}

static kvb_status score_tova(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, H = view->n_heads, G = view->n_kv_heads, group = H / G;
    bool layer = whole_layer(m);
    kvb_status status = check_window(m, view, 1, err);
    if (status != KVB_OK) return status;
    float *rows = need((size_t)H * T, sizeof *rows, "votes");
    layer_window_votes(view, 1, 1, rows);
    memset(s, 0, (size_t)G * T * sizeof *s);
    for (uint32_t h = 0; h < H; h++) {
        float *line = s + (layer ? 0 : (size_t)(h / group) * T), share = 1.0f / (float)(layer ? H : group);
        for (uint32_t j = 0; j < T; j++) line[j] += rows[(size_t)h * T + j] * share;
    }
    for (uint32_t g = 1; layer && g < G; g++) memcpy(s + (size_t)g * T, s, T * sizeof *s);
    free(rows);
    fill_tail(s, view, 1, 1);
    return KVB_OK;
}

static bool tova_press_fits(const metric *m, const char **warning)
{
    return whole_layer(m);
}

static uint32_t tova_least_tokens(const metric *m)
{
    return 2;
}

const scorer scorer_tova = {
    .spec = {.name = "tova",
             .parameters = {SPEC_CHOICE(tova_settings, scope, SCOPE_OF_LAYER, 1, "layer|group",
                                        "heads whose attention is averaged")}},
    .summary = "attention of the last query",
    .source = "TOVA, arXiv 2401.06104; scope=layer as kvpress deploys it, scope=group as KeyDiff's baseline",
    .formula = "s[g,j] = mean over all heads (layer), or over h in g (group), of A[h,T-1,j]",
    .needs = VIEW_Q | VIEW_K,
    .protect_sink = 4,
    .protect_window = 1,
    .least_tokens = tova_least_tokens,
    .score = score_tova,
    .press = "TOVAPress",
    .press_fits = tova_press_fits,
};
