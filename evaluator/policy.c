#include "evaluator/policy.h"
#include "formats/need.h"
#include "profiler/metric/scorer_parts.h"
#include "profiler/model/model.h"
#include "profiler/model/observe.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// Writes the indices of the best `keep` of n scores to `out`, ascending, and returns how many. The last `recent` and
// the first `sinks` are kept before others; of equal scores the lower index.
static uint32_t policy_best(const float *scores, uint32_t n, uint32_t keep, uint32_t sinks, uint32_t recent,
                            uint32_t *out)
{
    kvb_select(scores, n, keep, sinks, recent, out, n, NULL);
    return keep < n ? keep : n;
}

// ==== Policies that evict at every step by the attention they saw: MorphKV, TOVA, H2O; and StreamingLLM ====

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
// memory [R + 1, room]: a ring of R rows, counts[1] of them in use, the oldest at counts[0]; and a row for F. S_r[j] =
// sum over the group of A_r[h,j] for the last R queries; 0 for an entry that is newer than the row. Kept: the C =
// capacity - R best older entries by F[j] = sum (or max) over r of S_r[j], and the last R, the newest included (the
// paper's listing forgets it).

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

// Computes F over `count` entries into the last row of the memory, and returns it.
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
    if (span.count <= h->capacity) return KVB_OK;
    *n_keep = policy_best(morph_fuse(h, span.count), span.count, h->capacity, h->sink, morph_recent(h), keep);
    for (uint32_t i = 0; i < h->counts[1]; i++) compact_row(morph_row(h, i), keep, *n_keep);
    return KVB_OK;
}

static void morph_see(policy_head *h, const layer_view *view)
{
    uint32_t T = view->n_tokens, R = smaller(h->p->set.morphkv.window, view->n_queries);
    float *rows = need((size_t)2 * R * T, sizeof *rows, "numbers of attention rows");
    group_attention_rows(rows, rows + (size_t)R * T, view, h->kv_head, view->n_queries - R, R);
    h->counts[0] = 0;
    h->counts[1] = R;
    for (uint32_t i = 0; i < R; i++) memcpy(morph_row(h, i), rows + (size_t)i * T, T * sizeof *rows);
    free(rows);
}

static const policy_kind policy_morphkv = {
    .spec = {.name = "morphkv",
             .parameters = {SPEC(struct policy_morphkv_settings, window, 32, 1, 4096, "R, recent tokens and queries"),
                            SPEC_CHOICE(struct policy_morphkv_settings, fusion, FUSION_SUM, 1, "sum|max",
                                        "how the rows of the window are joined"),
                            SPEC(struct policy_morphkv_settings, interval, 1, 1, 1 << 20,
                                 "evict whenever so many tokens are new")}},
    .summary = "a constant cache: the last R tokens, and the older ones that the last R queries looked at most",
    .needs = VIEW_Q | VIEW_K,
    .floats = morph_floats,
    .see = morph_see,
    .attended = morph_attended,
    .evict = morph_evict,
};

// ---- TOVA (arXiv 2401.06104) ----
// memory [room]: the last query's attention, mean over the group as in KeyDiff's baseline

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
    if (span.count > h->capacity) *n_keep = policy_best(h->memory, span.count, h->capacity, 0, 1, keep);
    return KVB_OK;
}

static void tova_see(policy_head *h, const layer_view *view)
{
    uint32_t T = view->n_tokens;
    float *rows = need((size_t)2 * T, sizeof *rows, "numbers of attention rows");
    group_attention_rows(rows, rows + T, view, h->kv_head, view->n_queries - 1, 1);
    memcpy(h->memory, rows, T * sizeof *rows);
    free(rows);
}

static const policy_kind policy_tova = {.spec = {.name = "tova"},
                                        .summary = "every step evicts the token that the newest query attends to least",
                                        .needs = VIEW_Q | VIEW_K,
                                        .floats = one_row,
                                        .see = tova_see,
                                        .attended = tova_attended,
                                        .evict = tova_evict};

// ---- H2O (arXiv 2306.14048) ----
// memory [room]: attention summed over all queries so far; by default, half of the capacity is recent tokens

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
    if (span.count <= h->capacity) return KVB_OK;
    *n_keep = policy_best(h->memory, span.count, h->capacity, 0, h2o_recent(h), keep);
    compact_row(h->memory, keep, *n_keep);
    return KVB_OK;
}

static void h2o_see(policy_head *h, const layer_view *view)
{
    uint32_t T = view->n_tokens;
    for (uint32_t j = 0; j < T; j++) {
        h->memory[j] = 0;
        for (uint32_t r = 0; r < h->group; r++)
            h->memory[j] += view->column_sums[((size_t)h->kv_head * h->group + r) * T + j] / (float)h->group;
    }
}

static const policy_kind policy_h2o = {
    .spec = {.name = "h2o",
             .parameters = {SPEC(struct policy_h2o_settings, recent, 0.5, 0, 1,
                                 "share of the capacity that is recent")}},
    .summary = "half of the capacity recent tokens, half those with the most attention so far",
    .needs = VIEW_COLUMN_SUMS,
    .floats = one_row,
    .see = h2o_see,
    .attended = h2o_attended,
    .evict = h2o_evict,
};

// ---- StreamingLLM (arXiv 2309.17453): the first tokens and the most recent ones, keys keep their positions ----

static kvb_status stream_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err)
{
    uint32_t n = smaller(span.count, h->capacity), sinks = smaller(h->p->set.streaming.sinks, n);
    for (uint32_t i = sinks; i < n; i++) keep[i] = span.count - n + i;
    *n_keep = n;
    return KVB_OK;
}

static const policy_kind policy_streaming = {
    .spec = {.name = "streaming",
             .parameters = {SPEC(struct policy_streaming_settings, sinks, 4, 0, 4096, "first tokens that stay")}},
    .summary = "the first tokens and the most recent ones",
    .evict = stream_evict};

// ==== Policies that evict by keys and values alone ====
// KeyDiff block by block (arXiv 2504.15364, methods.md 3.2), LagKV recursively (arXiv 2504.04704, methods.md 3.4).

// ---- KeyDiff ----
// Keeps the N_c keys that point away from the mean of the keys compared; a share f of N_c is the most recent tokens.

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
    return span.count <= h->capacity ? KVB_OK : keydiff_best(h, span.k, span.count, keep, n_keep, err);
}

// As kvpress's BlockPress: all keys come from one full prefill. The first N_c are kept, then block after block joins
// them and the best N_c of both stay, so at most N_c + B keys are compared at a time.
static kvb_status keydiff_prefill(policy_head *h, const layer_view *view, uint32_t *keep, uint32_t *n_keep,
                                  kvb_error *err)
{
    uint32_t T = view->n_tokens, d = h->head_dim, block = h->p->set.keydiff.block,
             n = T < h->capacity ? T : h->capacity;
    const float *k = view->k + (size_t)h->kv_head * T * d;
    uint32_t *best = need((size_t)h->capacity + block, sizeof *best, "entries");
    float *keys = need(((size_t)h->capacity + block) * d, sizeof *keys, "numbers of keys");
    kvb_status status = KVB_OK;
    for (uint32_t at = n; status == KVB_OK && at < T; at += block) {
        uint32_t joined = n + (T - at < block ? T - at : block), n_best = 0;
        for (uint32_t i = n; i < joined; i++) keep[i] = at + i - n;
        for (uint32_t i = 0; i < joined; i++) memcpy(keys + (size_t)i * d, k + (size_t)keep[i] * d, d * sizeof *keys);
        status = keydiff_best(h, keys, joined, best, &n_best, err);
        for (uint32_t i = 0; status == KVB_OK && i < n_best; i++) keep[i] = keep[best[i]];
    }
    free_all(best, keys);
    *n_keep = n;
    return status;
}

static const policy_kind policy_keydiff = {
    .spec = {.name = "keydiff",
             .parameters = {SPEC(struct policy_keydiff_settings, block, 128, 1, 1 << 20,
                                 "prompt tokens that join at a time"),
                            SPEC(struct policy_keydiff_settings, window, 0, 0, 1,
                                 "f, share of the capacity that is kept for the most recent tokens")}},
    .summary = "block by block, keys that point away from the others stay; in decode a block is one token",
    .needs = VIEW_K,
    .metric = "keydiff",
    .prefill = keydiff_prefill,
    .evict = keydiff_evict,
};

// ---- LagKV: counts[0] entries are compressed already (sinks included) and never touched again ----
//
// When two partitions of `lag` tokens follow them, the first is judged by the second and cut to its best; a
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

// Compresses the oldest partition of the entries that `keep` lists, with keys k and values v: removes from `keep` those
// that the partition loses.
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
    free_all(keys, best);
}

static kvb_status lagkv_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err)
{
    uint32_t lag = h->p->set.lagkv.lag, sink = h->p->set.lagkv.sink;
    if (h->counts[0] < sink) h->counts[0] = span.count < sink ? span.count : sink;
    while (*n_keep - h->counts[0] >= 2 * lag) compress_partition(h, span.k, span.v, keep, n_keep);
    return KVB_OK;
}

static const policy_kind policy_lagkv = {
    .spec = {.name = "lagkv",
             .parameters = {SPEC(struct policy_lagkv_settings, lag, 128, 2, 1 << 20, "tokens per partition"),
                            SPEC(struct policy_lagkv_settings, sink, 16, 0, 4096, "first tokens, which stay"),
                            SPEC(struct policy_lagkv_settings, keep, 0, 0, 1,
                                 "r, share of a partition that stays; 0: what the capacity leaves"),
                            SPEC(struct policy_lagkv_settings, lambda, 1, 0, 1e6,
                                 "weight of the values against the keys")}},
    .summary = "partition by partition, tokens that stand out against the next partition stay",
    .needs = VIEW_K | VIEW_V,
    .evict = lagkv_evict,
};

// ==== Policies that keep their tokens and look at a few of them per step ====
//
// RocketKV's second stage (hybrid sparse attention, arXiv 2502.14051; methods.md 3.6) and special cases. Exact top-k:
// page 1, all channels. SparQ: page 1, few channels. Quest: pages, all channels.

static const policy_kind policy_topk, policy_quest, policy_sparq, policy_rocketkv, policy_rocketkv_mt;

// ---- The arithmetic ----

// Computes the second stage for a head that keeps n tokens and may fetch `fetched` keys and values.
static void rocket_second(rocket_split *s, double n, double fetched, uint32_t d)
{
    s->second = fetched > 0 && n > fetched ? n / fetched : 1;
    double page = ceil(sqrt(s->second));
    s->page = page <= s->second ? (uint32_t)page : 1;
    s->channels = d * s->page / s->second;
    s->k1 = s->channels >= d ? d : s->channels < 1 ? 1 : (uint32_t)s->channels;
    s->k2 = (uint32_t)(fetched / 2);
}

rocket_split rocket_split_for(double S, double fetched, uint32_t head_dim)
{
    double c = S / fetched;
    rocket_split s = {.exponent = 0, .keep = S};
    if (c <= 1) { // dense
        s.second = 1, s.page = 1, s.channels = head_dim, s.k1 = head_dim, s.k2 = (uint32_t)S;
        return s;
    }
    s.exponent = fmin(0.2 + 0.06 * log2(c), 0.8);
    s.keep = S / pow(c, s.exponent);
    rocket_second(&s, s.keep, fetched, head_dim);
    return s;
}

double policy_capacity_ratio(const policy *p, double ratio)
{
    if (p->kind != &policy_rocketkv && p->kind != &policy_rocketkv_mt) return ratio;
    return ratio <= 0 ? ratio : 1 - rocket_split_for(1, 1 - ratio, 1).keep;
}

void hsa_absorb(hsa *h, const float *key)
{
    float *low = h->low + (size_t)(h->n / h->page) * h->head_dim,
          *high = h->high + (size_t)(h->n / h->page) * h->head_dim;
    bool first = h->n % h->page == 0;
    for (uint32_t c = 0; c < h->head_dim; c++) {
        low[c] = first || key[c] < low[c] ? key[c] : low[c];
        high[c] = first || key[c] > high[c] ? key[c] : high[c];
    }
    h->n++;
}

// Picks the k1 channels with the largest sum over the group of |q_c| (ties: lower channel).
static void hsa_channels(const hsa *h, const float *q, uint32_t k1, uint32_t *picked)
{
    float sums[BACKEND_MAX_HEAD_DIM] = {0};
    for (uint32_t r = 0; r < h->group; r++)
        for (uint32_t c = 0; c < h->head_dim; c++) sums[c] += fabsf(q[(size_t)r * h->head_dim + c]);
    policy_best(sums, h->head_dim, k1, 0, 0, picked);
}

// Returns the share of a query's sum of |q_c| that the picked channels hold.
static float hsa_share(const hsa *h, const float *query, const uint32_t *picked, uint32_t k1)
{
    double all = 0, some = 0;
    for (uint32_t c = 0; c < h->head_dim; c++) all += fabsf(query[c]);
    for (uint32_t i = 0; i < k1; i++) some += fabsf(query[picked[i]]);
    return all > 0 ? (float)(some / all) : 1;
}

float hsa_estimate(const hsa *h, const float *q, uint32_t r, uint32_t page, const uint32_t *picked, uint32_t k1)
{
    const float *low = h->low + (size_t)page * h->head_dim, *high = h->high + (size_t)page * h->head_dim;
    double x = 0;
    for (uint32_t i = 0; i < k1; i++) {
        uint32_t c = picked[i];
        float sign = 0;
        for (uint32_t other = 0; other < h->group; other++) sign += q[(size_t)other * h->head_dim + c];
        x += (double)q[(size_t)r * h->head_dim + c] * (sign > 0 ? high[c] : low[c]);
    }
    return (float)x;
}

// Computes the group's mean of softmax(x / sqrt(d share)) over all n keys, each with its page's x; scratch [pages].
static void hsa_scores(const hsa *h, const float *q, uint32_t k1, float *out, float *scratch)
{
    uint32_t picked[BACKEND_MAX_HEAD_DIM], pages = (h->n + h->page - 1) / h->page;
    double unit = view_scale(&(layer_view){.head_dim = h->head_dim});
    hsa_channels(h, q, k1, picked);
    memset(out, 0, h->n * sizeof *out);
    for (uint32_t r = 0; r < h->group; r++) {
        float share = hsa_share(h, q + (size_t)r * h->head_dim, picked, k1);
        float scale = (float)(sqrt((double)share) / unit), top = -INFINITY;
        double sum = 0;
        for (uint32_t p = 0; p < pages; p++) {
            scratch[p] = scale > 0 ? hsa_estimate(h, q, r, p, picked, k1) / scale : 0;
            top = fmaxf(top, scratch[p]);
        }
        for (uint32_t i = 0; i < h->n; i++) sum += expf(scratch[i / h->page] - top);
        for (uint32_t i = 0; i < h->n; i++) out[i] += (float)(expf(scratch[i / h->page] - top) / sum / h->group);
    }
}

// ---- The policies ----
//
// Candidates of a step are, in order, the marks (RocketKV-MT: the tokens that this turn's first stage chose; else none)
// and the entries from counts[2] on. Until its first turn RocketKV-MT looks at everything, as the prefill of a turn's
// input does. counts: [0] keys absorbed into pages, [1] marks, [2] the entry where unmarked candidates begin. memory:
// minima [pages, d], maxima [pages, d], scores [room], scratch [room], and for RocketKV-MT the last queries [window,
// group, d], of which counts[3] have been seen.

typedef struct look {
    uint32_t page, k1, k2;
} look;

static uint32_t clamp(double x, uint32_t low, uint32_t high)
{
    return x < low ? low : x > high ? high : (uint32_t)x;
}

static look look_of(const policy_head *h)
{
    const policy_kind *kind = h->p->kind;
    if (kind == &policy_quest) return (look){h->p->set.quest.page, h->head_dim, h->capacity};
    if (kind == &policy_sparq) return (look){1, clamp(h->p->set.sparq.channels, 1, h->head_dim), h->capacity};
    if (kind == &policy_topk || h->split <= 0) return (look){1, h->head_dim, h->capacity};
    // Every head saves by the same factor in the second stage, however much of it the first stage kept.
    rocket_split s = rocket_split_for(h->n_context, h->n_context * (1 - h->split), h->head_dim);
    rocket_second(&s, h->capacity, h->capacity / s.second, h->head_dim);
    return (look){s.page, s.k1, s.k2 ? s.k2 : 1};
}

static size_t window_floats(const policy_head *h)
{
    return h->p->kind->turn ? (size_t)h->p->set.rocketkv_mt.window * h->group * h->head_dim : 0;
}

static size_t hsa_floats(const policy_head *h)
{
    size_t pages = h->room / look_of(h).page + 1;
    return 2 * pages * h->head_dim + 2 * (size_t)h->room + window_floats(h);
}

static float *windows_of(policy_head *h)
{
    return h->memory + hsa_floats(h) - window_floats(h);
}

static uint32_t entry_of(const policy_head *h, uint32_t candidate)
{
    return candidate < h->counts[1] ? h->marks[candidate] : h->counts[2] + candidate - h->counts[1];
}

static void remember_query(policy_head *h, const float *q)
{
    uint32_t window = h->p->set.rocketkv_mt.window;
    size_t size = (size_t)h->group * h->head_dim;
    float *queries = windows_of(h);
    if (h->counts[3] == window) memmove(queries, queries + size, (window - 1) * size * sizeof *queries);
    else h->counts[3]++;
    memcpy(queries + (h->counts[3] - 1) * size, q, size * sizeof *queries);
}

static uint32_t hsa_choose(policy_head *h, kv_span span, const float *q, uint32_t *indices)
{
    look l = look_of(h);
    size_t pages = h->room / l.page + 1;
    uint32_t n = h->counts[1] + (span.count - h->counts[2]);
    hsa s = {h->head_dim, h->group, l.page, h->counts[0], h->memory, h->memory + pages * h->head_dim};
    float *scores = h->memory + 2 * pages * h->head_dim, *scratch = scores + h->room;
    if (h->p->kind->turn) remember_query(h, q);
    if (h->p->kind->turn && h->counts[1] == 0) return UINT32_MAX;
    while (s.n < n) hsa_absorb(&s, span.k + (size_t)entry_of(h, s.n) * h->head_dim);
    h->counts[0] = n;
    if (n <= l.k2 && n == span.count) return UINT32_MAX;
    hsa_scores(&s, q, l.k1, scores, scratch);
    uint32_t n_best = policy_best(scores, n, l.k2, 0, 1, indices); // the newest token always sees itself
    for (uint32_t i = 0; i < n_best; i++) indices[i] = entry_of(h, indices[i]);
    return n_best;
}

static void mark_best(policy_head *h, const float *scores, uint32_t n)
{
    h->counts[1] = policy_best(scores, n, h->capacity, 0, h->p->set.rocketkv_mt.window, h->marks);
    h->counts[2] = n;
    h->counts[0] = 0;
}

static void multi_see(policy_head *h, const layer_view *view)
{
    uint32_t window = h->p->set.rocketkv_mt.window, T = view->n_tokens, first = T > window ? T - window : 0;
    size_t step = (size_t)view->n_heads * h->head_dim, offset = (size_t)h->kv_head * h->group * h->head_dim;
    for (uint32_t i = first; i < T; i++) remember_query(h, view->q + (i + view->n_queries - T) * step + offset);
}

// Runs the first stage again, over the whole history and with the last queries. Nothing was evicted, so every token can
// come back.
static kvb_status multi_turn(policy_head *h, kv_span span, kvb_error *err)
{
    uint32_t window = h->counts[3];
    metric first_stage = h->p->scores;
    float *scores = need(span.count, sizeof *scores, "scores");
    layer_view view = {.layer = h->layer,
                       .n_tokens = span.count,
                       .n_heads = h->group,
                       .n_kv_heads = 1,
                       .head_dim = h->head_dim,
                       .q = windows_of(h),
                       .k = span.k,
                       .v = span.v,
                       .n_queries = window,
                       .positions = span.positions,
                       .first_kv_head = h->kv_head};
    metric_set_value(&first_stage, "window", window);
    kvb_status status = span.count > window ? metric_score(&first_stage, &view, scores, err) : KVB_OK;
    if (status == KVB_OK) mark_best(h, scores, span.count);
    free(scores);
    return status;
}

static const policy_kind policy_topk = {.spec = {.name = "topk"},
                                        .summary =
                                            "looks at the tokens with the most attention, found by looking at all keys",
                                        .looks = true,
                                        .floats = hsa_floats,
                                        .choose = hsa_choose};
static const policy_kind policy_quest = {
    .spec = {.name = "quest",
             .parameters = {SPEC(struct policy_quest_settings, page, 16, 1, 4096, "tokens of a page")}},
    .summary = "looks at the tokens of the best pages, by each channel's minimum and maximum in a page",
    .looks = true,
    .floats = hsa_floats,
    .choose = hsa_choose,
};
static const policy_kind policy_sparq = {
    .spec = {.name = "sparq",
             .parameters = {SPEC(struct policy_sparq_settings, channels, 16, 1, BACKEND_MAX_HEAD_DIM,
                                 "channels of a key that are read")}},
    .summary = "looks at the best tokens by the query's largest channels alone",
    .looks = true,
    .floats = hsa_floats,
    .choose = hsa_choose,
};
static const policy_kind policy_rocketkv = {
    .spec = {.name = "rocketkv"},
    .summary = "evicts a part of the context, then looks at a part of the rest per step",
    .metric = "rocketkv",
    .ranks = true,
    .floats = hsa_floats,
    .choose = hsa_choose};
static const policy_kind policy_rocketkv_mt = {
    .spec = {.name = "rocketkv-mt",
             .parameters = {SPEC(struct policy_rocketkv_mt_settings, window, 32, 1, 4096, "last queries that choose")}},
    .summary = "RocketKV without eviction: every turn chooses again what it attends to",
    .looks = true,
    .needs = VIEW_Q,
    .metric = "rocketkv",
    .floats = hsa_floats,
    .see = multi_see,
    .choose = hsa_choose,
    .turn = multi_turn,
};

// ==== All of them ====

static const policy_kind policy_full = {.spec = {.name = "full"}, .summary = "the whole cache"};

const policy_kind *const policy_kinds[] = {&policy_full,      &policy_morphkv, &policy_tova,     &policy_h2o,
                                           &policy_streaming, &policy_keydiff, &policy_lagkv,    &policy_topk,
                                           &policy_quest,     &policy_sparq,   &policy_rocketkv, &policy_rocketkv_mt};
const size_t policy_kind_count = sizeof policy_kinds / sizeof *policy_kinds;

static const spec_row *policy_row(size_t i)
{
    return i < policy_kind_count ? &policy_kinds[i]->spec : NULL;
}

static const spec_list POLICIES = {"policy", policy_row, NULL};

kvb_status policy_parse(policy *out, const char *text, kvb_error *err)
{
    size_t row;
    *out = (policy){0};
    kvb_status status = spec_read(&POLICIES, text, 0, strlen(text), &row, &out->set, err);
    if (status != KVB_OK) return status;
    out->kind = policy_kinds[row];
    out->interval = out->kind == &policy_morphkv ? out->set.morphkv.interval : 1;
    if (out->kind->metric) status = metric_parse(&out->scores, out->kind->metric, err);
    return status == KVB_OK ? spec_write_all(out->spec, sizeof out->spec, &POLICIES, &out->kind->spec, &out->set, err)
                            : status;
}

// ---- One head ----

kvb_status policy_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err)
{
    for (uint32_t i = 0; i < span.count; i++) keep[i] = i;
    *n_keep = span.count;
    return h->p->kind->evict ? h->p->kind->evict(h, span, keep, n_keep, err) : KVB_OK;
}

kvb_status policy_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep, uint32_t *n_keep,
                          kvb_error *err)
{
    const policy_kind *kind = h->p->kind;
    uint32_t T = view->n_tokens;
    size_t at = (size_t)h->kv_head * T * h->head_dim;
    // A span's pointers are not const, but policies only read it: callers apply what an eviction decides.
    kv_span context = {view->k ? (float *)(uintptr_t)(view->k + at) : NULL,
                       view->v ? (float *)(uintptr_t)(view->v + at) : NULL, NULL, T};
    memset(h->counts, 0, sizeof h->counts);
    if (kind->see) kind->see(h, view);
    if (!kind->prefill && !kind->ranks) return policy_evict(h, context, keep, n_keep, err);
    for (uint32_t i = 0; i < T; i++) keep[i] = i;
    if (kind->prefill) return kind->prefill(h, view, keep, n_keep, err);
    *n_keep = policy_best(scores, T, h->capacity, metric_protect_sink(&h->p->scores),
                          metric_protect_window(&h->p->scores), keep);
    return KVB_OK;
}

kvb_status policy_new_turn(policy_head *h, kv_span span, kvb_error *err)
{
    return h->p->kind->turn ? h->p->kind->turn(h, span, err) : KVB_OK;
}
