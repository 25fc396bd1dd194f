// Policies that evict at every step by the attention they saw: MorphKV, TOVA, H2O; and StreamingLLM, which needs to see
// nothing.
#include "evaluator/policy_parts.h"
#include "formats/need.h"
#include "profiler/metric/scorer_parts.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

// x[i] = x[keep[i]]; keep is ascending.
static void compact_row(float *x, const uint32_t *keep, uint32_t n_keep)
{
    for (uint32_t i = 0; i < n_keep; i++) x[i] = x[keep[i]];
}

// ---- MorphKV (arXiv 2503.00979, algorithm 1; methods.md 3.5) ----
//
// memory [R, room]: S_r[j] = sum over the group of A_r[h,j] for the last R queries, oldest first from row counts[0] on,
// in a ring; counts[1] rows are there. A row that is older than an entry has 0 for it. Kept: the C = capacity - R best
// older entries by F[j] = sum (or max) over r of S_r[j], and the last R, the newest included (the paper's listing
// forgets it).

static uint32_t morph_recent(const policy_head *h)
{
    return smaller(h->p->set.morphkv.window, h->capacity);
}

static size_t morph_floats(const policy_head *h)
{
    return ((size_t)h->p->set.morphkv.window + 1) * h->room;
}

static float *morph_row(policy_head *h, uint32_t i)
{
    return h->memory + (size_t)((h->counts[0] + i) % h->p->set.morphkv.window) * h->room;
}

// F over `count` entries, in the last row of the memory.
static float *morph_fuse(policy_head *h, uint32_t count)
{
    bool maximum = h->p->set.morphkv.fusion == FUSION_MAX;
    float *fused = h->memory + (size_t)h->p->set.morphkv.window * h->room;
    memset(fused, 0, count * sizeof *fused);
    for (uint32_t i = 0; i < h->counts[1]; i++) {
        const float *row = morph_row(h, i);
        for (uint32_t j = 0; j < count; j++) fused[j] = maximum ? fmaxf(fused[j], row[j]) : fused[j] + row[j];
    }
    return fused;
}

static void morph_attended(policy_head *h, kv_span span, const float *weights)
{
    uint32_t R = h->p->set.morphkv.window;
    for (uint32_t i = 0; i < h->counts[1]; i++) morph_row(h, i)[span.count - 1] = 0; // older than the new entry
    if (h->counts[1] == R) h->counts[0] = (h->counts[0] + 1) % R;
    else h->counts[1]++;
    float *row = morph_row(h, h->counts[1] - 1);
    for (uint32_t j = 0; j < span.count; j++) {
        row[j] = 0;
        for (uint32_t r = 0; r < h->group; r++) row[j] += weights[(size_t)r * span.count + j];
    }
}

static kvb_status morph_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err)
{
    (void)err;
    *n_keep = span.count;
    if (span.count <= h->capacity) return KVB_OK;
    *n_keep = policy_best(morph_fuse(h, span.count), span.count, h->capacity, 0, morph_recent(h), keep);
    for (uint32_t i = 0; i < h->counts[1]; i++) compact_row(morph_row(h, i), keep, *n_keep);
    return KVB_OK;
}

static kvb_status morph_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                                uint32_t *n_keep, kvb_error *err)
{
    uint32_t T = view->n_tokens, R = smaller(h->p->set.morphkv.window, view->n_queries);
    float *rows = need((size_t)2 * R * T, sizeof *rows, "numbers of attention rows");
    (void)scores;
    policy_group_rows(rows, rows + (size_t)R * T, view, h->kv_head, view->n_queries - R, R);
    h->counts[0] = 0;
    h->counts[1] = R;
    for (uint32_t i = 0; i < R; i++) memcpy(morph_row(h, i), rows + (size_t)i * T, T * sizeof *rows);
    free(rows);
    kvb_status status = morph_evict(h, (kv_span){.count = T}, keep, n_keep, err);
    for (uint32_t i = 0; *n_keep == T && i < T; i++) keep[i] = i;
    return status;
}

const policy_kind policy_morphkv = {
    .spec = {.name = "morphkv",
             .parameters = {SPEC(struct policy_morphkv_settings, window, 32, 1, 4096, "R, recent tokens and queries"),
                            SPEC_CHOICE(struct policy_morphkv_settings, fusion, FUSION_SUM, 1, "sum|max",
                                        "how the rows of the window are joined")}},
    .summary = "a constant cache: the last R tokens, and the older ones that the last R queries looked at most",
    .needs = VIEW_Q | VIEW_K,
    .floats = morph_floats,
    .prefill = morph_prefill,
    .attended = morph_attended,
    .evict = morph_evict,
};

// ---- TOVA (arXiv 2401.06104): memory [room], the last query's attention, mean over the group as in KeyDiff's baseline
// ----

static size_t one_row(const policy_head *h)
{
    return h->room;
}

static void tova_attended(policy_head *h, kv_span span, const float *weights)
{
    for (uint32_t j = 0; j < span.count; j++) {
        h->memory[j] = 0;
        for (uint32_t r = 0; r < h->group; r++) h->memory[j] += weights[(size_t)r * span.count + j] / (float)h->group;
    }
}

static kvb_status tova_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err)
{
    (void)err;
    *n_keep = span.count;
    if (span.count > h->capacity) *n_keep = policy_best(h->memory, span.count, h->capacity, 0, 1, keep);
    return KVB_OK;
}

static kvb_status tova_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                               uint32_t *n_keep, kvb_error *err)
{
    uint32_t T = view->n_tokens;
    float *rows = need((size_t)2 * T, sizeof *rows, "numbers of attention rows");
    (void)scores;
    policy_group_rows(rows, rows + T, view, h->kv_head, view->n_queries - 1, 1);
    memcpy(h->memory, rows, T * sizeof *rows);
    free(rows);
    kvb_status status = tova_evict(h, (kv_span){.count = T}, keep, n_keep, err);
    for (uint32_t i = 0; *n_keep == T && i < T; i++) keep[i] = i;
    return status;
}

const policy_kind policy_tova = {.spec = {.name = "tova"},
                                 .summary = "at every step, the token that the newest query looks at least goes",
                                 .needs = VIEW_Q | VIEW_K,
                                 .floats = one_row,
                                 .prefill = tova_prefill,
                                 .attended = tova_attended,
                                 .evict = tova_evict};

// ---- H2O (arXiv 2306.14048): memory [room], attention summed over all queries so far; half of the capacity is recent
// ----

static uint32_t h2o_recent(const policy_head *h)
{
    return (uint32_t)(h->capacity * h->p->set.h2o.recent);
}

static void h2o_attended(policy_head *h, kv_span span, const float *weights)
{
    h->memory[span.count - 1] = 0;
    for (uint32_t j = 0; j < span.count; j++)
        for (uint32_t r = 0; r < h->group; r++) h->memory[j] += weights[(size_t)r * span.count + j] / (float)h->group;
}

static kvb_status h2o_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err)
{
    (void)err;
    *n_keep = span.count;
    if (span.count <= h->capacity) return KVB_OK;
    *n_keep = policy_best(h->memory, span.count, h->capacity, 0, h2o_recent(h), keep);
    compact_row(h->memory, keep, *n_keep);
    return KVB_OK;
}

static kvb_status h2o_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                              uint32_t *n_keep, kvb_error *err)
{
    uint32_t T = view->n_tokens;
    (void)scores;
    for (uint32_t j = 0; j < T; j++) {
        h->memory[j] = 0;
        for (uint32_t r = 0; r < h->group; r++)
            h->memory[j] += view->column_sums[((size_t)h->kv_head * h->group + r) * T + j] / (float)h->group;
    }
    kvb_status status = h2o_evict(h, (kv_span){.count = T}, keep, n_keep, err);
    for (uint32_t i = 0; *n_keep == T && i < T; i++) keep[i] = i;
    return status;
}

const policy_kind policy_h2o = {
    .spec = {.name = "h2o",
             .parameters = {SPEC(struct policy_h2o_settings, recent, 0.5, 0, 1,
                                 "share of the capacity that is recent")}},
    .summary = "half of the capacity recent tokens, half those with the most attention so far",
    .needs = VIEW_COLUMN_SUMS,
    .floats = one_row,
    .prefill = h2o_prefill,
    .attended = h2o_attended,
    .evict = h2o_evict,
};

// ---- StreamingLLM (arXiv 2309.17453): the first tokens and the most recent ones, keys keep their positions ----

static uint32_t stream_keep(const policy_head *h, uint32_t count, uint32_t *keep)
{
    uint32_t n = smaller(count, h->capacity), sinks = smaller(h->p->set.streaming.sinks, n);
    for (uint32_t i = 0; i < n; i++) keep[i] = i < sinks ? i : count - n + i;
    return n;
}

static kvb_status stream_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err)
{
    (void)err;
    *n_keep = stream_keep(h, span.count, keep);
    return KVB_OK;
}

static kvb_status stream_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                                 uint32_t *n_keep, kvb_error *err)
{
    (void)scores, (void)err;
    *n_keep = stream_keep(h, view->n_tokens, keep);
    return KVB_OK;
}

const policy_kind policy_streaming = {
    .spec = {.name = "streaming",
             .parameters = {SPEC(struct policy_streaming_settings, sinks, 4, 0, 4096, "first tokens that stay")}},
    .summary = "the first tokens and the most recent ones",
    .prefill = stream_prefill,
    .evict = stream_evict};
