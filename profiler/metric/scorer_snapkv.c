// SnapKV (arXiv 2404.14469; methods.md 3.1): what the last W context queries attend to.
//
//     a[h,w,j] = softmax over visible keys of q_w k_j / sqrt(d)        row w of the window sees j <= T - W + w
//     u[h,j]   = mean over w of a[h,w,j], for j < T - W
//     s[g,j]   = mean over h in group g of pool(u[h], kernel)[j]       or pool(mean over h in g of u[h])[j]
//
// The window's own positions get the layer's maximum (LU-KV) or that plus one (kvpress); both protect them anyway.
#include "profiler/metric/scorer_parts.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct snapkv_settings {
    uint32_t window, kernel;
    bool max_pool, group_first, group_max;
} snapkv_settings;

// out[j] = out (+) x[j] over the group: maximum, or sum with a weight
static void reduce(float *out, const float *x, uint32_t n, bool maximum, float weight)
{
    for (uint32_t j = 0; j < n; j++) out[j] = maximum ? fmaxf(out[j], x[j]) : out[j] + weight * x[j];
}

// One KV head: s [T], votes [H,T] of all heads; scratch [2,T].
static void combine_group(float *s, const float *votes, float *scratch, const layer_view *view, uint32_t g,
                          const snapkv_form *set)
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

kvb_status snapkv_scores(const metric *m, const layer_view *view, const snapkv_form *set, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, H = view->n_heads;
    kvb_status status = check_window(m, view, set->window, err);
    if (status != KVB_OK) return status;
    float *votes = need((size_t)H * T, sizeof *votes, "votes"), share = set->sum ? 1.0f : 1.0f / (float)set->window;
    layer_window_votes(view, set->window, share, votes);
#pragma omp parallel for schedule(static)
    for (uint32_t g = 0; g < view->n_kv_heads; g++) {
        float *scratch = need((size_t)2 * T, sizeof *scratch, "pooled votes");
        combine_group(s + (size_t)g * T, votes, scratch, view, g, set);
        free(scratch);
    }
    free(votes);
    fill_tail(s, view, set->window, set->tail_above);
    return KVB_OK;
}

static kvb_status score_snapkv(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    const snapkv_settings *set = metric_settings(m);
    const snapkv_form form = {.window = set->window,
                              .kernel = set->kernel,
                              .max_pool = set->max_pool,
                              .group_first = set->group_first,
                              .group_max = set->group_max,
                              .tail_above = (float)m->kind->constant};
    return snapkv_scores(m, view, &form, s, err);
}

static bool snapkv_press_fits(const metric *m, const char **warning)
{
    const snapkv_settings *set = metric_settings(m);
    if (set->max_pool)
        *warning = "kvpress has no SnapKV with max pooling: its ranking differs from the one that was calibrated";
    else if (set->group_max)
        *warning = "kvpress's SnapKV takes the mean over a group: its ranking differs from the one that was calibrated";
    return true;
}

#define PARAMETERS(window_, kernel_, max_pool_, group_first_)                                                          \
    {                                                                                                                  \
        SPEC(snapkv_settings, window, window_, 1, 65536, "last context queries that vote"),                            \
            SPEC(snapkv_settings, kernel, kernel_, 1, 255, "width of the pooling over positions, odd"),                \
            SPEC_ON_OFF(snapkv_settings, max_pool, max_pool_, "1 = max pooling, 0 = average, zeros beyond the edges"), \
            SPEC_ON_OFF(snapkv_settings, group_first, group_first_,                                                    \
                        "1 = reduce over the query heads of a group, then pool"),                                      \
            SPEC_ON_OFF(snapkv_settings, group_max, 0, "1 = maximum over the group, 0 = mean")                         \
    }
// `above`: how far the scores of the window's tokens, which are kept, are above the highest vote.
#define VARIANT(usual_, label, above, text, origin, ...)                                              \
    {                                                                                                 \
        .spec = {"snapkv", label, PARAMETERS(__VA_ARGS__), NULL}, .summary = text,                    \
        .source = "SnapKV, arXiv 2404.14469; " origin,                                                \
        .formula = "s[g,j] = mean over h in g of pool(mean over the last W queries w of A[h,w,j]);\n" \
                   "group_first=1: pool(mean, or maximum, over h in g of that mean)",                 \
        .needs = VIEW_Q | VIEW_K, .protect_sink = 4, .score = score_snapkv, .check = check_kernel,    \
        .press = "SnapKVPress",                                                                       \
        .press_arguments = {PRESS_ARGUMENT("window_size", snapkv_settings, window),                   \
                            PRESS_ARGUMENT("kernel_size", snapkv_settings, kernel)},                  \
        .press_fits = snapkv_press_fits, .constant = above, .usual = usual_,                          \
    }

const scorer scorer_snapkv_kvpress = VARIANT(true, "kvpress", 1, "attention of the last 64 queries, average pooling",
                                             "as kvpress deploys it", 64, 5, 0, 0);
const scorer scorer_snapkv_lukv =
    VARIANT(false, "lukv", 0, "attention of the last 32 queries, max pooling", "as LU-KV published it", 32, 7, 1, 0);
const scorer scorer_snapkv_adakv =
    VARIANT(false, "adakv", 1, "attention of the last 32 queries, mean over the group, then max pooling",
            "as AdaKV (arXiv 2407.11550) does it", 32, 7, 1, 1);
const scorer scorer_snapkv_factory = VARIANT(false, "factory", 1, "attention of the last 8 queries, max pooling",
                                             "as KVCache-Factory does it", 8, 7, 1, 0);
const scorer scorer_snapkv_keydiff = VARIANT(false, "keydiff", 1, "attention of the last 32 queries, average pooling",
                                             "the baseline of the KeyDiff paper (arXiv 2504.15364)", 32, 7, 0, 0);
