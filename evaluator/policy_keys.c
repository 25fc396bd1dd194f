// Policies that evict by keys and values alone: KeyDiff block by block (arXiv 2504.15364, methods.md 3.2), LagKV
// recursively (2504.04704, 3.4).
#include "evaluator/policy_parts.h"
#include "formats/need.h"
#include "profiler/metric/scorer_parts.h"
#include <stdlib.h>
#include <string.h>

#define PREFILL_PARAMETER(settings)                               \
    SPEC_CHOICE(settings, prefill, READS_WHOLE, 1, "full|blocks", \
                "with full attention, or in blocks over what was kept so far")

// ---- KeyDiff: keep the N_c keys that point away from the mean of exactly these keys; a share f of N_c is the most
// recent ----

static kvb_status keydiff_best(const policy_head *h, const float *keys, uint32_t n, uint32_t *keep, uint32_t *n_keep,
                               kvb_error *err)
{
    layer_view view = {.layer = h->layer,
                       .n_tokens = n,
                       .n_heads = h->group,
                       .n_kv_heads = 1,
                       .head_dim = h->head_dim,
                       .k = keys,
                       .first_kv_head = h->kv_head};
    uint32_t recent = (uint32_t)((double)h->capacity * h->p->set.keydiff.window);
    float *scores = need(n, sizeof *scores, "scores");
    kvb_status status = metric_score(&h->p->scores, &view, scores, err);
    if (status == KVB_OK) *n_keep = policy_best(scores, n, h->capacity, 0, recent, keep);
    free(scores);
    return status;
}

static kvb_status keydiff_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err)
{
    *n_keep = span.count;
    return span.count <= h->capacity ? KVB_OK : keydiff_best(h, span.k, span.count, keep, n_keep, err);
}

// As kvpress's BlockPress: all keys come from one full prefill; the first N_c are there, then block after block joins
// them and the best N_c of both stay. So N_c + B keys are compared at most.
static kvb_status keydiff_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                                  uint32_t *n_keep, kvb_error *err)
{
    uint32_t T = view->n_tokens, d = h->head_dim, block = h->p->set.keydiff.block,
             n = T < h->capacity ? T : h->capacity;
    const float *k = view->k + (size_t)h->kv_head * T * d;
    uint32_t *best = need((size_t)h->capacity + block, sizeof *best, "entries");
    float *keys = need(((size_t)h->capacity + block) * d, sizeof *keys, "numbers of keys");
    kvb_status status = KVB_OK;
    (void)scores;
    for (uint32_t i = 0; i < n; i++) keep[i] = i;
    for (uint32_t at = n; status == KVB_OK && at < T; at += block) {
        uint32_t joined = n + (T - at < block ? T - at : block), n_best = 0;
        for (uint32_t i = n; i < joined; i++) keep[i] = at + i - n;
        for (uint32_t i = 0; i < joined; i++) memcpy(keys + (size_t)i * d, k + (size_t)keep[i] * d, d * sizeof *keys);
        status = keydiff_best(h, keys, joined, best, &n_best, err);
        for (uint32_t i = 0; status == KVB_OK && i < n_best; i++) keep[i] = keep[best[i]];
    }
    free(best);
    free(keys);
    *n_keep = n;
    return status;
}

static uint32_t keydiff_block(const policy *p, uint32_t at)
{
    (void)at;
    return p->set.keydiff.block;
}

static bool keydiff_reads_blocks(const policy *p)
{
    return p->set.keydiff.prefill == READS_BLOCKS;
}

const policy_kind policy_keydiff = {
    .spec = {.name = "keydiff",
             .parameters = {SPEC(struct policy_keydiff_settings, block, 128, 1, 1 << 20,
                                 "prompt tokens that join at a time"),
                            SPEC(struct policy_keydiff_settings, window, 0, 0, 1,
                                 "f, share of the capacity that is kept for the most recent tokens"),
                            PREFILL_PARAMETER(struct policy_keydiff_settings)}},
    .summary = "block by block, keys that point away from the others stay; in decode a block is one token",
    .needs = VIEW_K,
    .metric = "keydiff",
    .prefill = keydiff_prefill,
    .reads_blocks = keydiff_reads_blocks,
    .block = keydiff_block,
    .evict = keydiff_evict,
};

// ---- LagKV: counts[0] entries are compressed already (sinks included) and never touched again ----
//
// When two partitions of `lag` tokens stand behind them, the first is judged by the second and cut to its best; a
// context of T tokens ends with S + kept (n - 1) + lag + (T - S) mod lag, n = floor((T - S) / lag).

static uint32_t kept_per_partition(const policy_head *h)
{
    uint32_t sink = h->p->set.lagkv.sink, lag = h->p->set.lagkv.lag;
    double share = h->p->set.lagkv.keep;
    if (share > 0) return (uint32_t)(share * lag);
    // Without a share, what the capacity leaves beside sinks, last partition and remainder.
    if (h->n_context < sink + 2 * lag) return lag;
    uint32_t n = (h->n_context - sink) / lag, fixed = sink + lag + (h->n_context - sink) % lag;
    uint32_t kept = h->capacity > fixed ? (h->capacity - fixed) / (n - 1) : 0;
    return kept < lag ? kept : lag;
}

// Compresses the oldest partition of n entries with keys k and values v; removes the others from `keep`, the list of
// what is left.
static void compress_partition(policy_head *h, const float *k, const float *v, uint32_t *keep, uint32_t *n_keep)
{
    uint32_t lag = h->p->set.lagkv.lag, d = h->head_dim, first = h->counts[0], kept = kept_per_partition(h);
    size_t rows = (size_t)2 * lag * d;
    float *keys = need(2 * rows + 3 * (size_t)d + 2 * (size_t)lag, sizeof *keys, "numbers of keys and values"),
          *values = keys + rows, *scores = values + rows, *scratch = scores + lag;
    uint32_t *best = need(lag, sizeof *best, "entries");
    for (uint32_t i = 0; i < 2 * lag; i++) {
        memcpy(keys + (size_t)i * d, k + (size_t)keep[first + i] * d, d * sizeof *keys);
        memcpy(values + (size_t)i * d, v + (size_t)keep[first + i] * d, d * sizeof *keys);
    }
    lagkv_partition(scores, 1, keys, lag, keys + rows / 2, lag, d, scratch);
    lagkv_partition(scores, (float)h->p->set.lagkv.lambda, values, lag, values + rows / 2, lag, d, scratch);
    uint32_t n_best = policy_best(scores, lag, kept, 0, 0, best);
    for (uint32_t i = 0; i < n_best; i++) keep[first + i] = keep[first + best[i]];
    memmove(keep + first + n_best, keep + first + lag, (*n_keep - first - lag) * sizeof *keep);
    *n_keep -= lag - n_best;
    h->counts[0] += n_best;
    free(keys);
    free(best);
}

static void lagkv_compress(policy_head *h, const float *k, const float *v, uint32_t n, uint32_t *keep, uint32_t *n_keep)
{
    uint32_t lag = h->p->set.lagkv.lag, sink = h->p->set.lagkv.sink;
    for (uint32_t i = 0; i < n; i++) keep[i] = i;
    *n_keep = n;
    if (h->counts[0] < sink) h->counts[0] = n < sink ? n : sink;
    while (*n_keep - h->counts[0] >= 2 * lag) compress_partition(h, k, v, keep, n_keep);
}

static kvb_status lagkv_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err)
{
    (void)err;
    lagkv_compress(h, span.k, span.v, span.count, keep, n_keep);
    return KVB_OK;
}

static kvb_status lagkv_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                                uint32_t *n_keep, kvb_error *err)
{
    size_t at = (size_t)h->kv_head * view->n_tokens * h->head_dim;
    (void)scores, (void)err;
    lagkv_compress(h, view->k + at, view->v + at, view->n_tokens, keep, n_keep);
    return KVB_OK;
}

// Sinks and two partitions first, then partition by partition.
static uint32_t lagkv_block(const policy *p, uint32_t at)
{
    const struct policy_lagkv_settings *set = &p->set.lagkv;
    return at ? set->lag : set->sink + 2 * set->lag;
}

// Below two partitions behind what is compressed, of which no more than the last context's partitions leave.
static uint32_t lagkv_most(const policy_head *h)
{
    uint32_t sink = h->p->set.lagkv.sink, lag = h->p->set.lagkv.lag;
    uint64_t most = sink + (uint64_t)kept_per_partition(h) * (h->n_context / lag) + 2 * (uint64_t)lag;
    return most < h->room ? (uint32_t)most : h->room;
}

static bool lagkv_reads_blocks(const policy *p)
{
    return p->set.lagkv.prefill == READS_BLOCKS;
}

const policy_kind policy_lagkv = {
    .spec = {.name = "lagkv",
             .parameters = {SPEC(struct policy_lagkv_settings, lag, 128, 2, 1 << 20, "tokens per partition"),
                            SPEC(struct policy_lagkv_settings, sink, 16, 0, 4096, "first tokens, which stay"),
                            SPEC(struct policy_lagkv_settings, keep, 0, 0, 1,
                                 "r, share of a partition that stays; 0: what the capacity leaves"),
                            SPEC(struct policy_lagkv_settings, lambda, 1, 0, 1e6,
                                 "weight of the values against the keys"),
                            PREFILL_PARAMETER(struct policy_lagkv_settings)}},
    .summary = "partition by partition, tokens that stand out against the next partition stay",
    .needs = VIEW_K | VIEW_V,
    .prefill = lagkv_prefill,
    .reads_blocks = lagkv_reads_blocks,
    .block = lagkv_block,
    .most = lagkv_most,
    .evict = lagkv_evict,
};
