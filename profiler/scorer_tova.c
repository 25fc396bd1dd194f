// TOVA (arXiv 2401.06104; methods.md 3.7): the attention of the last query alone.
//
//     s[g,j] = mean over all H heads of A[h,T-1,j]          scope=layer: the same row for every KV head, as TOVA and kvpress have it
//     s[g,j] = mean over h in g of A[h,T-1,j]               scope=group: KeyDiff's baseline
#include "profiler/scorer_parts.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

static kvb_status score_tova(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, H = view->n_heads, G = view->n_kv_heads, group = H / G;
    bool layer = metric_value(m, "scope") == 0;
    kvb_status status = check_window(m, view, 1, err);
    if (status != KVB_OK) return status;
    float *rows = malloc((size_t)H * T * sizeof *rows);
    if (!rows)
        return kvb_fail(err, KVB_MEMORY, "metric %s: no memory for %u attention rows of %u tokens", m->spec, H, T);
    if (view->device) status = device_window_votes(view->device, 1, rows, err);
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t h = view->device ? H : 0; h < H; h++)
        attention_rows(rows + (size_t)h * T, view, h, view->n_queries - 1, 1);
    memset(s, 0, (size_t)G * T * sizeof *s);
    for (uint32_t h = 0; h < H; h++) {
        float *line = s + (layer ? 0 : (size_t)(h / group) * T), share = 1.0f / (float)(layer ? H : group);
        for (uint32_t j = 0; j < T; j++) line[j] += rows[(size_t)h * T + j] * share;
    }
    for (uint32_t g = 1; layer && g < G; g++) memcpy(s + (size_t)g * T, s, T * sizeof *s);
    free(rows);
    fill_tail(s, view, 1, 1);
    return status;
}

const scorer scorer_tova = {
    .name = "tova",
    .variant = "",
    .summary = "attention of the last query",
    .source = "TOVA, arXiv 2401.06104; scope=layer as kvpress deploys it, scope=group as KeyDiff's baseline",
    .formula = "s[g,j] = mean over all heads (layer), or over h in g (group), of A[h,T-1,j]",
    .needs = VIEW_Q | VIEW_K,
    .needs_on_device = need_no_tensors,
    .protect_sink = 4,
    .protect_window = 1,
    .parameters = {{"scope", 0, 0, 1, true, "heads whose attention is averaged", "layer|group"}},
    .score = score_tova,
};
