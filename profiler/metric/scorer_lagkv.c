// LagKV (arXiv 2504.04704; methods.md 3.4): tokens that stand out against the partition that follows.
//
//     partitions of `lag` tokens from position `sink` on; partition p is judged by partition p + 1, for Z in {K, V}:
//     z' = (z - min) / (max - min)  per channel, min and max over partition p + 1
//     t_j = softmax over the partition of the standard deviation of z'_j over its channels (divisor d - 1)
//     score = t^K + lambda t^V;  rank within the partition / lag, or the score itself (cross=1)
//
// Sinks, the last full partition and the tokens after it are kept: they get the highest score. mode=local takes min and
// max of the partition itself, mode=l2norm ranks by -||k||; both are ablations of the paper. The ranks (an equal share
// of every partition) are nested, and with the budget that the published one-shot compression leaves they keep exactly
// the same tokens.
#include "profiler/metric/scorer_parts.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum lag_mode { LAG_NEXT, LAG_LOCAL, LAG_L2NORM } lag_mode;

typedef struct lagkv_settings {
    uint32_t sink, lag;
    lag_mode mode;
    bool cross;
    double lambda;
} lagkv_settings;

// out[j] += weight * softmax of the spreads t [n], which are overwritten.
static void add_partition(float *out, float weight, float *t, uint32_t n)
{
    float top = -INFINITY;
    double sum = 0;
    for (uint32_t j = 0; j < n; j++) top = fmaxf(top, t[j]);
    for (uint32_t j = 0; j < n; j++) sum += t[j] = expf(t[j] - top);
    for (uint32_t j = 0; j < n; j++) out[j] += weight * (float)(t[j] / sum);
}

void lagkv_partition(float *out, float weight, const float *z, uint32_t n, const float *ref, uint32_t n_ref, uint32_t d,
                     float *scratch)
{
    float *t = scratch + 3 * (size_t)d;
    partition_spreads(t, z, n, ref, n_ref, d, scratch);
    add_partition(out, weight, t, n);
}

typedef struct ranked_token {
    float score;
    uint32_t at;
} ranked_token;

// Worst first; of equals the later one is worse.
static int by_rank(const void *a, const void *b)
{
    const ranked_token *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? -1 : 1;
    return x->at > y->at ? -1 : x->at < y->at;
}

static void scores_to_ranks(float *s, uint32_t n, ranked_token *order)
{
    for (uint32_t j = 0; j < n; j++) order[j] = (ranked_token){s[j], j};
    qsort(order, n, sizeof *order, by_rank);
    for (uint32_t r = 0; r < n; r++) s[order[r].at] = (float)r / (float)n;
}

typedef struct lag_form {
    uint32_t sink, lag;
    lag_mode mode;
    bool cross;
    float key_weight, value_weight;
} lag_form;

// What is known of a layer's tokens, [G,T] each: spreads of keys and of values; or the norms of the keys alone.
typedef struct lag_sums {
    float *keys, *values;
} lag_sums;

// s [lag] of the partition that starts at token `at` (of all heads), before ranks.
static void join_partition(float *s, const lag_sums *sums, size_t at, const lag_form *set)
{
    memset(s, 0, set->lag * sizeof *s);
    if (set->mode == LAG_L2NORM) {
        for (uint32_t j = 0; j < set->lag; j++) s[j] = -sums->keys[at + j];
        return;
    }
    add_partition(s, set->key_weight, sums->keys + at, set->lag);
    add_partition(s, set->value_weight, sums->values + at, set->lag);
}

// s [T] of head g; order is scratch [lag]
static void score_head(float *s, const layer_view *view, uint32_t g, const lag_form *set, const lag_sums *sums,
                       ranked_token *order)
{
    uint32_t T = view->n_tokens, lag = set->lag, partitions = (T - set->sink) / lag;
    for (uint32_t p = 0; p + 1 < partitions; p++) {
        uint32_t at = set->sink + p * lag;
        join_partition(s + at, sums, (size_t)g * T + at, set);
        if (!set->cross) scores_to_ranks(s + at, lag, order);
    }
    float top = set->key_weight + set->value_weight; // no softmax is larger, no rank reaches 1
    for (uint32_t j = 0; j < set->sink; j++) s[j] = top;
    for (uint32_t j = set->sink + (partitions - 1) * lag; j < T; j++) s[j] = top;
}

static void take_sums(const layer_view *view, const lag_form *set, lag_sums *out)
{
    size_t n = (size_t)view->n_kv_heads * view->n_tokens;
    uint32_t partitions = (view->n_tokens - set->sink) / set->lag;
    const partition_row row = {set->sink, set->lag, partitions - 1, set->mode == LAG_LOCAL};
    if (set->mode != LAG_L2NORM) {
        layer_spreads(view, VIEW_K, row, out->keys);
        layer_spreads(view, VIEW_V, row, out->values);
        return;
    }
    double *norms = need(n, sizeof *norms, "norms of keys");
    layer_norms(view, VIEW_K, norms);
    for (size_t i = 0; i < n; i++) out->keys[i] = (float)norms[i];
    free(norms);
}

static kvb_status score_lagkv(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens;
    const lagkv_settings *given = metric_settings(m);
    float lambda = (float)given->lambda, both = 1 + lambda;
    bool mean = m->kind->constant != 0;
    const lag_form set = {given->sink,  given->lag,          given->mode,
                          given->cross, mean ? 1 / both : 1, mean ? lambda / both : lambda};
    size_t n = (size_t)view->n_kv_heads * T;
    float *keys = need(2 * n, sizeof *keys, "spreads of keys and values");
    lag_sums sums = {keys, keys + n};
    take_sums(view, &set, &sums);
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t g = 0; g < view->n_kv_heads; g++) {
        ranked_token *order = need(set.lag, sizeof *order, "tokens of a partition");
        score_head(s + (size_t)g * T, view, g, &set, &sums, order);
        free(order);
    }
    free(keys);
    return KVB_OK;
}

// The sinks and two partitions.
static uint32_t lagkv_least_tokens(const metric *m)
{
    const lagkv_settings *set = metric_settings(m);
    return set->sink + 2 * set->lag;
}

static bool lagkv_press_fits(const metric *m, const char **warning)
{
    const lagkv_settings *set = metric_settings(m);
    if (set->mode != LAG_NEXT || set->lambda != 1)
        *warning = "kvpress's LagKV has no other mode or weight: its ranking differs from the one that was calibrated";
    return true;
}

#define PARAMETERS(sink_, lag_)                                                                                   \
    {                                                                                                             \
        SPEC(lagkv_settings, sink, sink_, 0, 4096, "first tokens, which are kept"),                               \
            SPEC(lagkv_settings, lag, lag_, 2, 65536, "tokens per partition"),                                    \
            SPEC_CHOICE(lagkv_settings, mode, LAG_NEXT, 2, "lag|local|l2norm",                                    \
                        "against the next partition, the own one, or by -||k||"),                                 \
            SPEC_ON_OFF(lagkv_settings, cross, 0, "1 = compare scores across partitions, 0 = ranks within each"), \
            SPEC(lagkv_settings, lambda, 1, 0, 1e6, "weight of the values against the keys")                      \
    }
// `mean`: 1 = the weighted mean of keys and values, 0 = their weighted sum.
#define VARIANT(label, mean, text, origin, sink_, lag_)                                                            \
    {                                                                                                              \
        .spec = {"lagkv", label, PARAMETERS(sink_, lag_), NULL}, .summary = text,                                  \
        .source = "LagKV, arXiv 2504.04704; " origin,                                                              \
        .formula = "partitions of `lag` tokens, each seen against the next one: z' = (z - min) / (max - min) per " \
                   "channel;\n"                                                                                    \
                   "t_j = softmax over the partition of std(z'_j); s[g,j] = rank within the partition of t^K + "   \
                   "lambda t^V",                                                                                   \
        .needs = VIEW_K | VIEW_V, .protect_sink = sink_, .protect_window = 1, .least_tokens = lagkv_least_tokens,  \
        .score = score_lagkv, .press = "LagKVPress",                                                               \
        .press_arguments = {PRESS_ARGUMENT("n_sink", lagkv_settings, sink),                                        \
                            PRESS_ARGUMENT("lag_size", lagkv_settings, lag),                                       \
                            PRESS_ARGUMENT("cross_scoring", lagkv_settings, cross)},                               \
        .press_fits = lagkv_press_fits, .constant = mean,                                                          \
    }

const scorer scorer_lagkv_kvpress = VARIANT("kvpress", 1, "spread of keys and values against the next 128 tokens",
                                            "as kvpress's LagKVPress (mean of keys and values)", 4, 128);
const scorer scorer_lagkv_paper =
    VARIANT("paper", 0, "spread of keys and values against the next 1024 tokens",
            "defaults of the published code (the paper also has lag 128 and 512)", 16, 1024);
