// MorphKV's static form (arXiv 2503.00979; methods.md 3.5): the correlation of older tokens with the last R queries, each row of it
// summed over the query heads of the group.
//
//     S_r[g,j] = sum over h in g of A[h,r,j], r = the last R queries
//     s[g,j]   = sum over r of S_r[g,j]   (fusion=sum)      or  max over r of S_r[g,j]   (fusion=max)
//
// In decode the policy keeps these rows and shifts them by one per step; here they are the prompt's last R, as in its first step.
#include "profiler/scorer_parts.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 32 };

// sum [ROWS,T] and rows [ROWS,T] are scratch.
static void fuse_group(float *s, float *sum, float *rows, const layer_view *view, uint32_t g, uint32_t window,
                       bool maximum)
{
    uint32_t T = view->n_tokens, old = T - window, group = view->n_heads / view->n_kv_heads;
    memset(s, 0, T * sizeof(float));
    for (uint32_t w = 0; w < window; w += ROWS) {
        uint32_t n = window - w < ROWS ? window - w : ROWS, first = view->n_queries - window + w;
        attention_rows(sum, view, g * group, first, n);
        for (uint32_t h = 1; h < group; h++) {
            attention_rows(rows, view, g * group + h, first, n);
            for (size_t i = 0; i < (size_t)n * T; i++) sum[i] += rows[i];
        }
        for (uint32_t r = 0; r < n; r++) {
            const float *line = sum + (size_t)r * T;
            for (uint32_t j = 0; j < old; j++) s[j] = maximum ? fmaxf(s[j], line[j]) : s[j] + line[j];
        }
    }
}

// The sum over the window's queries, when the device has made it.
static kvb_status sum_votes(const metric *m, const layer_view *view, float *s, uint32_t window, kvb_error *err)
{
    uint32_t T = view->n_tokens, H = view->n_heads, group = H / view->n_kv_heads;
    float *votes = malloc((size_t)H * T * sizeof *votes);
    kvb_status status =
        votes ? device_window_votes(view->device, window, votes, err)
              : kvb_fail(err, KVB_MEMORY, "metric %s: no memory for the votes of %u heads on %u tokens", m->spec, H, T);
    if (status == KVB_OK) memset(s, 0, (size_t)view->n_kv_heads * T * sizeof *s);
    for (uint32_t h = 0; status == KVB_OK && h < H; h++)
        for (uint32_t j = 0; j < T; j++) s[(size_t)(h / group) * T + j] += votes[(size_t)h * T + j];
    free(votes);
    if (status == KVB_OK) fill_tail(s, view, window, 1);
    return status;
}

static unsigned needs_on_device(const metric *m)
{
    return metric_value(m, "fusion") != 0 ? VIEW_Q | VIEW_K : 0; // a maximum over queries needs each one's row
}

static kvb_status score_morphkv(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, G = view->n_kv_heads, window = (uint32_t)metric_value(m, "window");
    bool maximum = metric_value(m, "fusion") != 0;
    int failures = 0;
    kvb_status status = check_window(m, view, window, err);
    if (status != KVB_OK) return status;
    if (view->device && !maximum) return sum_votes(m, view, s, window, err);
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures)
    for (uint32_t g = 0; g < G; g++) {
        float *scratch = malloc((size_t)2 * ROWS * T * sizeof *scratch);
        if (scratch) fuse_group(s + (size_t)g * T, scratch, scratch + (size_t)ROWS * T, view, g, window, maximum);
        else failures++;
        free(scratch);
    }
    if (failures)
        return kvb_fail(err, KVB_MEMORY, "metric %s: no memory for %d attention rows of %u tokens", m->spec, 2 * ROWS,
                        T);
    fill_tail(s, view, window, 1);
    return KVB_OK;
}

const scorer scorer_morphkv = {
    .name = "morphkv",
    .variant = "",
    .summary = "attention of the last 32 queries, summed over the group, fused over the queries by sum or maximum",
    .source = "MorphKV, arXiv 2503.00979; its static form, no pooling. Its experiments use window 30, 32 and 200",
    .formula = "s[g,j] = sum, or maximum, over the last W queries r of the sum over h in g of A[h,r,j]",
    .needs = VIEW_Q | VIEW_K,
    .needs_on_device = needs_on_device,
    .protect_sink = 4,
    .protect_window = PROTECT_WINDOW_PARAMETER,
    .parameters = {{"window", 32, 1, 65536, true, "last context queries that vote", NULL},
                   {"fusion", 0, 0, 1, true, "how the rows of the window are joined", "sum|max"}},
    .score = score_morphkv,
};
