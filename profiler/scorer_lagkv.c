// LagKV (arXiv 2504.04704; methods.md 3.4): tokens that stand out against the partition that follows.
//
//     partitions of `lag` tokens from position `sink` on; partition p is judged by partition p + 1, for Z in {K, V}:
//     z' = (z - min) / (max - min)  per channel, min and max over partition p + 1
//     t_j = softmax over the partition of the standard deviation of z'_j over its channels (divisor d - 1)
//     score = t^K + lambda t^V;  rank within the partition / lag, or the score itself (cross=1)
//
// Sinks, the last partition and what remains behind it are kept: they get the highest score. mode=local takes min and max of the own
// partition, mode=l2norm ranks by -||k||; both are ablations of the paper. The ranks (an equal share of every partition) are nested, and
// with the budget that the published one-shot compression leaves over they keep exactly its tokens.
#include "profiler/scorer_parts.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum lag_mode { MODE_LAG, MODE_LOCAL, MODE_L2NORM } lag_mode;

// low and scale [d]: z' = (z - low) * scale; a constant channel counts as 0.
static void channel_range(float *low, float *scale, const float *ref, uint32_t n_ref, uint32_t d)
{
    memcpy(low, ref, d * sizeof *low);
    memcpy(scale, ref, d * sizeof *scale);
    for (uint32_t j = 1; j < n_ref; j++)
        for (uint32_t c = 0; c < d; c++) {
            float z = ref[(size_t)j * d + c];
            low[c] = z < low[c] ? z : low[c];
            scale[c] = z > scale[c] ? z : scale[c];
        }
    for (uint32_t c = 0; c < d; c++) scale[c] = scale[c] > low[c] ? 1.0f / (scale[c] - low[c]) : 0.0f;
}

SIMD_CLONES static double spread(const float *z, const float *low, const float *scale, float *turned, uint32_t d)
{
    double sum = 0, square = 0;
#pragma omp simd reduction(+ : sum)
    for (uint32_t c = 0; c < d; c++) {
        turned[c] = (z[c] - low[c]) * scale[c];
        sum += turned[c];
    }
    double mean = sum / d;
#pragma omp simd reduction(+ : square)
    for (uint32_t c = 0; c < d; c++) square += (turned[c] - mean) * (turned[c] - mean);
    return sqrt(square / (d > 1 ? d - 1 : 1));
}

// out[j] += weight * softmax of the spreads t [n], which are used up.
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
    float *low = scratch, *scale = scratch + d, *turned = scratch + 2 * (size_t)d, *t = turned + d;
    channel_range(low, scale, ref, n_ref, d);
    for (uint32_t j = 0; j < n; j++) t[j] = (float)spread(z + (size_t)j * d, low, scale, turned, d);
    add_partition(out, weight, t, n);
}

typedef struct entry {
    float score;
    uint32_t at;
} entry;

// Worst first; of equals the later one is worse.
static int by_rank(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? -1 : 1;
    return x->at > y->at ? -1 : x->at < y->at;
}

static void scores_to_ranks(float *s, uint32_t n, entry *order)
{
    for (uint32_t j = 0; j < n; j++) order[j] = (entry){s[j], j};
    qsort(order, n, sizeof *order, by_rank);
    for (uint32_t r = 0; r < n; r++) s[order[r].at] = (float)r / (float)n;
}

typedef struct lag_settings {
    uint32_t sink, lag;
    lag_mode mode;
    bool cross;
    float key_weight, value_weight;
} lag_settings;

// What a device makes of a layer, [G,T] each: spreads of keys and of values; or the norms of the keys and nothing.
typedef struct lag_sums {
    float *keys, *values;
} lag_sums;

// s [lag] of the partition that starts at token `at` of head g, before ranks.
static void score_partition(float *s, const layer_view *view, uint32_t g, uint32_t at, const lag_settings *set,
                            float *scratch)
{
    uint32_t d = view->head_dim, lag = set->lag, ref = set->mode == MODE_LOCAL ? at : at + lag;
    size_t head = (size_t)g * view->n_tokens * d;
    const float *k = view->k + head + (size_t)at * d, *v = view->v + head + (size_t)at * d;
    memset(s, 0, lag * sizeof *s);
    if (set->mode == MODE_L2NORM) {
        for (size_t j = 0; j < lag; j++) s[j] = (float)-sqrt(dot_double(k + j * d, k + j * d, d));
        return;
    }
    lagkv_partition(s, set->key_weight, k, lag, k + (size_t)(ref - at) * d, lag, d, scratch);
    lagkv_partition(s, set->value_weight, v, lag, v + (size_t)(ref - at) * d, lag, d, scratch);
}

// The same from what the device has made.
static void join_partition(float *s, const lag_sums *sums, size_t at, const lag_settings *set)
{
    memset(s, 0, set->lag * sizeof *s);
    if (set->mode == MODE_L2NORM) {
        for (uint32_t j = 0; j < set->lag; j++) s[j] = -sums->keys[at + j];
        return;
    }
    add_partition(s, set->key_weight, sums->keys + at, set->lag);
    add_partition(s, set->value_weight, sums->values + at, set->lag);
}

// s [T] of head g; scratch [3 d + lag], order [lag]; sums NULL: from the view's tensors
static void score_head(float *s, const layer_view *view, uint32_t g, const lag_settings *set, const lag_sums *sums,
                       float *scratch, entry *order)
{
    uint32_t T = view->n_tokens, lag = set->lag, partitions = (T - set->sink) / lag;
    for (uint32_t p = 0; p + 1 < partitions; p++) {
        uint32_t at = set->sink + p * lag;
        if (sums) join_partition(s + at, sums, (size_t)g * T + at, set);
        else score_partition(s + at, view, g, at, set, scratch);
        if (!set->cross) scores_to_ranks(s + at, lag, order);
    }
    float top = set->key_weight + set->value_weight; // no softmax is larger, no rank reaches 1
    for (uint32_t j = 0; j < set->sink; j++) s[j] = top;
    for (uint32_t j = set->sink + (partitions - 1) * lag; j < T; j++) s[j] = top;
}

// To be freed: out->keys, which the values follow.
static kvb_status sums_on_device(const metric *m, const layer_view *view, const lag_settings *set, lag_sums *out,
                                 kvb_error *err)
{
    uint32_t T = view->n_tokens, partitions = (T - set->sink) / set->lag;
    size_t n = (size_t)view->n_kv_heads * T;
    partition_row row = {set->sink, set->lag, partitions - 1, set->mode == MODE_LOCAL};
    float *keys = malloc(2 * n * sizeof *keys);
    kvb_status status = keys ? KVB_OK : kvb_fail(err, KVB_MEMORY, "metric %s: no memory for %u tokens", m->spec, T);
    if (status == KVB_OK)
        status = set->mode == MODE_L2NORM ? device_norms(view->device, VIEW_K, keys, err)
                                          : device_spreads(view->device, VIEW_K, row, keys, err);
    if (status == KVB_OK && set->mode != MODE_L2NORM) status = device_spreads(view->device, VIEW_V, row, keys + n, err);
    if (status != KVB_OK) free(keys);
    else *out = (lag_sums){keys, keys + n};
    return status;
}

static kvb_status score_lagkv(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens;
    float lambda = (float)metric_value(m, "lambda"), both = 1 + lambda;
    bool mean = strcmp(m->kind->variant, "kvpress") == 0;
    const lag_settings set = {(uint32_t)metric_value(m, "sink"),
                              (uint32_t)metric_value(m, "lag"),
                              (lag_mode)metric_value(m, "mode"),
                              metric_value(m, "cross") != 0,
                              mean ? 1 / both : 1,
                              mean ? lambda / both : lambda};
    if (T < set.sink + 2 * set.lag)
        return kvb_fail(err, KVB_ARGUMENT,
                        "metric %s: the context has %u tokens, expected at least %u sinks and two partitions of %u; "
                        "use a longer context or :lag=N",
                        m->spec, T, set.sink, set.lag);
    int failures = 0;
    lag_sums sums = {NULL, NULL};
    if (view->device) {
        kvb_status status = sums_on_device(m, view, &set, &sums, err);
        if (status != KVB_OK) return status;
    }
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures)
    for (uint32_t g = 0; g < view->n_kv_heads; g++) {
        entry *order = malloc(set.lag * sizeof *order);
        float *scratch = malloc((3 * (size_t)view->head_dim + set.lag) * sizeof *scratch);
        if (order && scratch) score_head(s + (size_t)g * T, view, g, &set, sums.keys ? &sums : NULL, scratch, order);
        else failures++;
        free(order);
        free(scratch);
    }
    free(sums.keys);
    return failures ? kvb_fail(err, KVB_MEMORY, "metric %s: no memory for partitions of %u tokens", m->spec, set.lag)
                    : KVB_OK;
}

#define PARAMETERS(sink, lag)                                                                                     \
    {                                                                                                             \
        {"sink", sink, 0, 4096, true, "first tokens, which are kept", NULL},                                      \
            {"lag", lag, 2, 65536, true, "tokens per partition", NULL},                                           \
            {"mode", 0, 0, 2, true, "against the next partition, the own one, or by -||k||", "lag|local|l2norm"}, \
            {"cross", 0, 0, 1, true, "1 = compare scores across partitions, 0 = ranks within each", NULL},        \
            {"lambda", 1, 0, 1e6, false, "weight of the values against the keys", NULL},                          \
    }
#define FORMULA                                                                                               \
    "partitions of `lag` tokens, each seen against the next one: z' = (z - min) / (max - min) per channel;\n" \
    "t_j = softmax over the partition of std(z'_j); s[g,j] = rank within the partition of t^K + lambda t^V"

const scorer scorer_lagkv_kvpress = {
    .name = "lagkv",
    .variant = "kvpress",
    .summary = "spread of keys and values against the next 128 tokens",
    .source = "LagKV, arXiv 2504.04704; as kvpress's LagKVPress (mean of keys and values)",
    .formula = FORMULA,
    .needs = VIEW_K | VIEW_V,
    .needs_on_device = need_no_tensors,
    .protect_sink = 4,
    .protect_window = 1,
    .parameters = PARAMETERS(4, 128),
    .score = score_lagkv,
};

const scorer scorer_lagkv_paper = {
    .name = "lagkv",
    .variant = "paper",
    .summary = "spread of keys and values against the next 1024 tokens",
    .source = "LagKV, arXiv 2504.04704; defaults of the published code (the paper also has lag 128 and 512)",
    .formula = FORMULA,
    .needs = VIEW_K | VIEW_V,
    .needs_on_device = need_no_tensors,
    .protect_sink = 16,
    .protect_window = 1,
    .parameters = PARAMETERS(16, 1024),
    .score = score_lagkv,
};
