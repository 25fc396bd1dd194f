// SnapKV (arXiv 2404.14469; methods.md 3.1): what the last W context queries attend to.
//
//     a[h,w,j] = softmax over visible keys of q_w k_j / sqrt(d)        row w of the window sees j <= T - W + w
//     u[h,j]   = mean over w of a[h,w,j], for j < T - W
//     s[g,j]   = mean over h in group g of pool(u[h], kernel)[j]       or pool(mean over h in g of u[h])[j]
//
// The window's own positions get the layer's maximum (LU-KV) or that plus one (kvpress); both protect them anyway.
#include "profiler/scorer_parts.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 32 }; // window queries whose attention is held at a time

// u[j] += factor * the attention of the window's queries of head h, summed. rows is scratch [ROWS, T].
static void add_votes(float *u, float *rows, const layer_view *view, uint32_t h, uint32_t window, float factor)
{
    uint32_t T = view->n_tokens, old = T - window;
    for (uint32_t w = 0; w < window; w += ROWS) {
        uint32_t n = window - w < ROWS ? window - w : ROWS;
        attention_rows(rows, view, h, view->n_queries - window + w, n);
        for (uint32_t r = 0; r < n; r++)
            for (uint32_t j = 0; j < old; j++) u[j] += rows[(size_t)r * T + j] * factor;
    }
}

// out[j] = out (+) x[j] over the group: maximum, or sum with a weight
static void reduce(float *out, const float *x, uint32_t n, bool maximum, float weight)
{
    for (uint32_t j = 0; j < n; j++) out[j] = maximum ? fmaxf(out[j], x[j]) : out[j] + weight * x[j];
}

// One KV head: s [T], votes [H,T] of all heads; scratch [2,T].
static void combine_group(float *s, const float *votes, float *scratch, const layer_view *view, uint32_t g,
                          const snapkv_settings *set)
{
    uint32_t T = view->n_tokens, old = T - set->window, group = view->n_heads / view->n_kv_heads;
    float weight = set->sum ? 1.0f : 1.0f / (float)group, *reduced = scratch + T;
    memset(s, 0, T * sizeof(float));
    memset(reduced, 0, T * sizeof(float));
    for (uint32_t h = g * group; h < (g + 1) * group; h++) {
        const float *u = votes + (size_t)h * T;
        if (set->group_first) {
            reduce(reduced, u, old, set->group_max, weight);
            continue;
        }
        pool_row(reduced, u, scratch, old, set->kernel, set->max_pool);
        reduce(s, reduced, old, set->group_max, weight);
    }
    if (set->group_first) pool_row(s, reduced, scratch, old, set->kernel, set->max_pool);
}

kvb_status snapkv_scores(const metric *m, const layer_view *view, const snapkv_settings *set, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, H = view->n_heads, G = view->n_kv_heads;
    kvb_status status = check_window(m, view, set->window, err);
    if (status != KVB_OK) return status;
    int failures = 0;
    float *votes = calloc((size_t)H * T, sizeof *votes), share = set->sum ? 1.0f : 1.0f / (float)set->window;
    if (votes && view->device) status = device_window_votes(view->device, set->window, votes, err);
    for (size_t i = 0; votes && view->device && i < (size_t)H * T; i++) votes[i] *= share;
#pragma omp parallel reduction(+ : failures)
    {
        float *scratch = malloc((size_t)ROWS * T * sizeof *scratch);
        failures = !scratch || !votes;
#pragma omp for schedule(dynamic, 1)
        for (uint32_t h = 0; h < H; h++)
            if (!failures && !view->device) add_votes(votes + (size_t)h * T, scratch, view, h, set->window, share);
#pragma omp for schedule(static)
        for (uint32_t g = 0; g < G; g++)
            if (!failures) combine_group(s + (size_t)g * T, votes, scratch, view, g, set);
        free(scratch);
    }
    free(votes);
    if (status != KVB_OK) return status;
    if (failures)
        return kvb_fail(err, KVB_MEMORY, "metric %s: no memory for %u + %d attention rows of %u tokens", m->spec, H,
                        ROWS, T);
    fill_tail(s, view, set->window, set->tail_above);
    return KVB_OK;
}

static kvb_status score_snapkv(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    const snapkv_settings set = {.window = (uint32_t)metric_value(m, "window"),
                                 .kernel = (uint32_t)metric_value(m, "kernel"),
                                 .max_pool = metric_value(m, "max_pool") != 0,
                                 .group_first = metric_value(m, "group_first") != 0,
                                 .group_max = metric_value(m, "group_max") != 0,
                                 .tail_above = strcmp(m->kind->variant, "lukv") == 0 ? 0.0f : 1.0f};
    return snapkv_scores(m, view, &set, s, err);
}

#define PARAMETERS(window, kernel, max_pool, group_first)                                                            \
    {                                                                                                                \
        {"window", window, 1, 65536, true, "last context queries that vote", NULL},                                  \
            {"kernel", kernel, 1, 255, true, "width of the pooling over positions, odd", NULL},                      \
            {"max_pool", max_pool, 0, 1, true, "1 = max pooling, 0 = average, zeros beyond the edges", NULL},        \
            {"group_first", group_first, 0, 1, true, "1 = reduce over the query heads of a group, then pool", NULL}, \
            {"group_max", 0, 0, 1, true, "1 = maximum over the group, 0 = mean", NULL},                              \
    }
#define VARIANT(label, text, origin, ...)                                                                         \
    {                                                                                                             \
        .name = "snapkv", .variant = label, .summary = text, .source = "SnapKV, arXiv 2404.14469; " origin,       \
        .formula = "s[g,j] = mean over h in g of pool(mean over the last W queries w of A[h,w,j]);\n"             \
                   "group_first=1: pool(mean, or maximum, over h in g of that mean)",                             \
        .needs = VIEW_Q | VIEW_K, .needs_on_device = need_no_tensors, .protect_sink = 4,                          \
        .protect_window = PROTECT_WINDOW_PARAMETER, .parameters = PARAMETERS(__VA_ARGS__), .score = score_snapkv, \
        .check = check_kernel,                                                                                    \
    }

const scorer scorer_snapkv_kvpress =
    VARIANT("kvpress", "attention of the last 64 queries, average pooling", "as kvpress deploys it", 64, 5, 0, 0);
const scorer scorer_snapkv_lukv =
    VARIANT("lukv", "attention of the last 32 queries, max pooling", "as LU-KV published it", 32, 7, 1, 0);
const scorer scorer_snapkv_adakv =
    VARIANT("adakv", "attention of the last 32 queries, mean over the group, then max pooling",
            "as AdaKV (arXiv 2407.11550) does it", 32, 7, 1, 1);
const scorer scorer_snapkv_factory =
    VARIANT("factory", "attention of the last 8 queries, max pooling", "as KVCache-Factory does it", 8, 7, 1, 0);
const scorer scorer_snapkv_keydiff = VARIANT("keydiff", "attention of the last 32 queries, average pooling",
                                             "the baseline of the KeyDiff paper (arXiv 2504.15364)", 32, 7, 0, 0);
