// Policies that keep their tokens and look at a few of them per step: RocketKV's second stage (hybrid sparse attention,
// arXiv 2502.14051; methods.md 3.6) and its corners. Exact top-k: page 1, all channels. SparQ: page 1, few channels.
// Quest: pages, all channels.
#include "evaluator/policy_parts.h"
#include "formats/need.h"
#include "profiler/model/model.h"
#include "profiler/model/observe.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- The arithmetic ----

void rocket_second(rocket_split *s, double n, double fetched, uint32_t d)
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

void hsa_channels(const hsa *h, const float *q, uint32_t k1, uint32_t *picked, float *share)
{
    float sums[BACKEND_MAX_HEAD_DIM] = {0};
    for (uint32_t r = 0; r < h->group; r++)
        for (uint32_t c = 0; c < h->head_dim; c++) sums[c] += fabsf(q[(size_t)r * h->head_dim + c]);
    policy_best(sums, h->head_dim, k1, 0, 0, picked);
    for (uint32_t r = 0; r < h->group; r++) {
        const float *query = q + (size_t)r * h->head_dim;
        double all = 0, some = 0;
        for (uint32_t c = 0; c < h->head_dim; c++) all += fabsf(query[c]);
        for (uint32_t i = 0; i < k1; i++) some += fabsf(query[picked[i]]);
        share[r] = all > 0 ? (float)(some / all) : 1;
    }
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

void hsa_scores(const hsa *h, const float *q, uint32_t k1, float *out, float *scratch)
{
    enum { MAX_GROUP = 256 }; // query heads per KV head; more are read as if the rest were not there
    uint32_t picked[BACKEND_MAX_HEAD_DIM], pages = (h->n + h->page - 1) / h->page,
                                           group = h->group < MAX_GROUP ? h->group : MAX_GROUP;
    double unit = view_scale(&(layer_view){.head_dim = h->head_dim});
    float share[MAX_GROUP];
    hsa_channels(h, q, k1, picked, share);
    memset(out, 0, h->n * sizeof *out);
    for (uint32_t r = 0; r < group; r++) {
        float scale = (float)(sqrt((double)share[r]) / unit), top = -INFINITY;
        double sum = 0;
        for (uint32_t p = 0; p < pages; p++) {
            scratch[p] = scale > 0 ? hsa_estimate(h, q, r, p, picked, k1) / scale : 0;
            top = fmaxf(top, scratch[p]);
        }
        for (uint32_t i = 0; i < h->n; i++) sum += expf(scratch[i / h->page] - top);
        for (uint32_t i = 0; i < h->n; i++) out[i] += (float)(expf(scratch[i / h->page] - top) / sum / group);
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
    // Every head saves as much in the second stage, whatever the first kept of it.
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

// Nothing is evicted, so the entries are the context's tokens.
static kvb_status keep_all(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                           uint32_t *n_keep, kvb_error *err)
{
    (void)scores, (void)err;
    for (uint32_t i = 0; i < view->n_tokens; i++) keep[i] = i;
    *n_keep = view->n_tokens;
    h->counts[2] = 0;
    return KVB_OK;
}

static void mark_best(policy_head *h, const float *scores, uint32_t n)
{
    h->counts[1] = policy_best(scores, n, h->capacity, 0, h->p->set.rocketkv_mt.window, h->marks);
    h->counts[2] = n;
    h->counts[0] = 0;
}

static kvb_status multi_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep,
                                uint32_t *n_keep, kvb_error *err)
{
    uint32_t window = h->p->set.rocketkv_mt.window, T = view->n_tokens, first = T > window ? T - window : 0;
    size_t step = (size_t)view->n_heads * h->head_dim, offset = (size_t)h->kv_head * h->group * h->head_dim;
    kvb_status status = keep_all(h, view, scores, keep, n_keep, err);
    h->counts[3] = 0;
    for (uint32_t i = first; i < T; i++) remember_query(h, view->q + (i + view->n_queries - T) * step + offset);
    return status;
}

// The first stage again, over the whole history and with the queries that came last. Nothing was evicted, so every
// token can come back.
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

const policy_kind policy_topk = {.spec = {.name = "topk"},
                                 .summary = "looks at the tokens with the most attention, found by looking at all keys",
                                 .looks = true,
                                 .floats = hsa_floats,
                                 .prefill = keep_all,
                                 .choose = hsa_choose};
const policy_kind policy_quest = {
    .spec = {.name = "quest",
             .parameters = {SPEC(struct policy_quest_settings, page, 16, 1, 4096, "tokens of a page")}},
    .summary = "looks at the tokens of the best pages, by each channel's minimum and maximum in a page",
    .looks = true,
    .floats = hsa_floats,
    .prefill = keep_all,
    .choose = hsa_choose,
};
const policy_kind policy_sparq = {
    .spec = {.name = "sparq",
             .parameters = {SPEC(struct policy_sparq_settings, channels, 16, 1, BACKEND_MAX_HEAD_DIM,
                                 "channels of a key that are read")}},
    .summary = "looks at the best tokens by the query's largest channels alone",
    .looks = true,
    .floats = hsa_floats,
    .prefill = keep_all,
    .choose = hsa_choose,
};
const policy_kind policy_rocketkv = {.spec = {.name = "rocketkv"},
                                     .summary =
                                         "evicts a part of the context, then looks at a part of the rest per step",
                                     .metric = "rocketkv",
                                     .floats = hsa_floats,
                                     .choose = hsa_choose};
const policy_kind policy_rocketkv_mt = {
    .spec = {.name = "rocketkv-mt",
             .parameters = {SPEC(struct policy_rocketkv_mt_settings, window, 32, 1, 4096, "last queries that choose")}},
    .summary = "RocketKV that evicts nothing: every turn chooses anew what it looks at",
    .looks = true,
    .needs = VIEW_Q,
    .metric = "rocketkv",
    .floats = hsa_floats,
    .prefill = multi_prefill,
    .choose = hsa_choose,
    .turn = multi_turn,
};
