// What acts on a cache while tokens are generated: policies that evict at every step, and policies that look at a part
// of the cache.
//
// A policy is written `name[:parameter=value...]`. What a policy may keep
// (or fetch, where it evicts nothing) is one number per KV head, its capacity: the same for all heads as published, or
// a table's.
#pragma once
#include "evaluator/cache.h"
#include "profiler/metric/scorer.h"

enum { POLICY_SPEC_MAX = 192 };

typedef struct policy_kind policy_kind;

// What each policy can be told; the rows of parameters stand with the policies, which say what a field means.
typedef union policy_settings {
    struct policy_morphkv_settings {
        uint32_t window;
        uint32_t fusion; // a row_fusion (scorer_parts.h)
    } morphkv;
    struct policy_h2o_settings {
        double recent;
    } h2o;
    struct policy_streaming_settings {
        uint32_t sinks;
    } streaming;
    struct policy_keydiff_settings {
        uint32_t block;
        double window;
    } keydiff;
    struct policy_lagkv_settings {
        uint32_t lag, sink;
        double keep, lambda;
    } lagkv;
    struct policy_quest_settings {
        uint32_t page;
    } quest;
    struct policy_sparq_settings {
        uint32_t channels;
    } sparq;
    struct policy_rocketkv_mt_settings {
        uint32_t window;
    } rocketkv_mt;
} policy_settings;

typedef struct policy {
    const policy_kind *kind;
    char spec[POLICY_SPEC_MAX]; // canonical text
    policy_settings set;
    metric scores; // that rank tokens, after the prefill or at every step; kind NULL where the policy has its own way
} policy;

extern const policy_kind *const policy_kinds[];
extern const size_t policy_kind_count;

// Reads a policy; the message of KVB_ARGUMENT lists what there is.
kvb_status policy_parse(policy *out, const char *text, kvb_error *err);

// The pruned ratio at which capacities are to be computed, when `ratio` of a context's cache traffic is to be saved:
// ratio itself, but for RocketKV, whose first stage evicts less, by the split rule of methods.md 3.6, and whose second
// stage saves the rest.
double policy_capacity_ratio(const policy *p, double ratio);

// ---- One head ----

// One KV head under a policy. Plain memory, so that a copy of both arrays is a copy of the state.
typedef struct policy_head {
    const policy *p;
    uint32_t layer, kv_head, group, head_dim;
    uint32_t capacity;      // entries that it keeps, or fetches per step
    uint32_t n_context;     // T
    uint32_t room;          // entries that the cache may ever hold
    double split;           // pruned share of all traffic that was asked for (RocketKV)
    uint32_t counts[4];     // what the policy counts; see each file
    uint64_t looked, steps; // entries attended to, summed over steps
    float *memory;          // kind->floats() numbers
    uint32_t *marks;        // [room]
} policy_head;

struct policy_kind {
    spec_row spec; // name and parameters, whose values are in policy.set
    const char *summary;
    bool looks;                             // a capacity limits what is fetched per step, not what is kept
    unsigned needs;                         // view_items of prefill(), beside those of the metric
    const char *metric;                     // of policy.scores
    size_t (*floats)(const policy_head *h); // of memory; NULL: none
    bool ranks;                             // of a prefilled context the capacity's best by that metric stay
    // What it learns from a layer's prefill; NULL: nothing.
    void (*see)(policy_head *h, const layer_view *view);
    // Which of the T tokens of a prefilled context stay; see policy_prefill. NULL: those that `evict` leaves of them.
    kvb_status (*prefill)(policy_head *h, const layer_view *view, uint32_t *keep, uint32_t *n_keep, kvb_error *err);
    // As decode_hooks.choose and .attended, for one row: q [group, d], weights [group, span.count]. NULL: everything is
    // looked at; nothing is learned.
    uint32_t (*choose)(policy_head *h, kv_span span, const float *q, uint32_t *indices);
    void (*attended)(policy_head *h, kv_span span, const float *weights);
    // See policy_new_turn. NULL: turns change nothing.
    kvb_status (*turn)(policy_head *h, kv_span span, kvb_error *err);
    // After a step: what stays. `keep` [span.count] and *n_keep come with everything in them. NULL: everything stays.
    kvb_status (*evict)(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err);
};

// The best `keep` of n by score, ascending; the last `recent` and first `sinks` are kept before others. Ties: lower
// index. Returns how many.
uint32_t policy_best(const float *scores, uint32_t n, uint32_t keep, uint32_t sinks, uint32_t recent, uint32_t *out);

// Which of a prefilled context's T tokens stay, ascending, into keep [T], and the state behind them. `scores` [T] are
// those of the policy's metric, where it ranks.
kvb_status policy_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep, uint32_t *n_keep,
                          kvb_error *err);
// Which of the entries of `span` stay after a step, ascending, into keep [span.count].
kvb_status policy_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err);

// ---- RocketKV (methods.md 3.6) ----

typedef struct rocket_split {
    double exponent; // alpha = min(0.2 + 0.06 log2 c, 0.8)
    double keep;     // N, tokens that the first stage keeps, = S / c^alpha
    double second;   // c2 = c^(1 - alpha), what the second stage saves
    uint32_t page;   // p = ceil(sqrt(c2)) if <= c2, else 1
    double channels; // k1 = d p / c2, unrounded
    uint32_t k1, k2; // int(k1) within 1 .. d; floor(t / 2)
} rocket_split;

// For a sequence of S tokens of which `fetched` keys and values may be fetched per KV head and step.
rocket_split rocket_split_for(double S, double fetched, uint32_t head_dim);
// The second stage for a head that keeps n tokens and may fetch `fetched` keys and values.
void rocket_second(rocket_split *s, double n, double fetched, uint32_t head_dim);

// Hybrid sparse attention: pages of `page` keys with each channel's minimum and maximum.
typedef struct hsa {
    uint32_t head_dim, group, page;
    uint32_t n;        // keys absorbed
    float *low, *high; // [pages, d]
} hsa;

void hsa_absorb(hsa *h, const float *key);
// The k1 channels with the largest sum over the group of |q_c| (ties: lower channel), ascending. Returns the share of
// all |q_c| that they hold, per query head, in share [group].
void hsa_channels(const hsa *h, const float *q, uint32_t k1, uint32_t *picked, float *share);
// x of one page for query head r: sum over the picked channels of q_rc times the page's maximum where the group's sum
// of q_c is positive, else times its minimum. With all channels it bounds q_r k from above for every key of the page
// where the group's signs agree (Quest's bound).
float hsa_estimate(const hsa *h, const float *q, uint32_t r, uint32_t page, const uint32_t *picked, uint32_t k1);
// Mean over the group of softmax(x / sqrt(d share)) over all n keys, each with its page's x. q [group, d]; out [n];
// scratch [pages].
void hsa_scores(const hsa *h, const float *q, uint32_t k1, float *out, float *scratch);

// Tells a head that a new turn begins, behind the entries of `span`: RocketKV-MT chooses its tokens anew. Others ignore
// it.
kvb_status policy_new_turn(policy_head *h, kv_span span, kvb_error *err);
