// Policies act on a cache while tokens are generated: some evict at every step, others attend to a part of the cache.
//
// A policy is written `name[:parameter=value...]`. Its capacity, one number per KV head, is how many entries it may
// keep, or fetch per step if it evicts nothing: the same for all heads, as published, or a table's budgets.
#pragma once
#include "evaluator/cache.h"
#include "profiler/metric/scorer.h"

enum { POLICY_SPEC_MAX = 192 };

typedef struct policy_kind policy_kind;

// The parameters of each policy; its policy_kind in policy.c says what a field means.
typedef union policy_settings {
    struct policy_morphkv_settings {
        uint32_t window;
        uint32_t fusion; // a row_fusion (scorer_parts.h)
        uint32_t interval;
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
    metric scores;     // ranks tokens after the prefill or at every step; kind NULL: the policy has its own rule
    uint32_t interval; // new tokens from one eviction to the next
} policy;

extern const policy_kind *const policy_kinds[];
extern const size_t policy_kind_count;

// Parses a policy; on KVB_ARGUMENT the message lists the known ones.
kvb_status policy_parse(policy *out, const char *text, kvb_error *err);

// Returns the pruned ratio at which to compute capacities if `ratio` of a context's cache traffic is to be saved:
// `ratio` itself, except for RocketKV, whose first stage evicts less (the split rule of methods.md 3.6) and whose
// second stage saves the rest.
double policy_capacity_ratio(const policy *p, double ratio);

// One KV head under a policy. Plain data: a copy of it and of both arrays is a copy of the state.
typedef struct policy_head {
    const policy *p;
    uint32_t layer, kv_head, group, head_dim;
    uint32_t capacity;      // entries that it keeps, or fetches per step
    uint32_t n_context;     // T
    uint32_t room;          // entries that the cache may ever hold
    uint32_t sink;          // first entries that always stay, if a table says so
    double split;           // pruned share of all traffic that was asked for (RocketKV)
    uint32_t counts[4];     // the policy's own counters; policy.c says which
    uint64_t looked, steps; // entries attended to, summed over all steps; steps
    float *memory;          // kind->floats() numbers
    uint32_t *marks;        // [room] entries that RocketKV-MT's first stage chose
} policy_head;

struct policy_kind {
    spec_row spec; // name and parameters, whose values are in policy.set
    const char *summary;
    bool looks;                             // true: a capacity limits what is fetched per step, not what is kept
    unsigned needs;                         // view_items that see() and prefill() read, besides those of the metric
    const char *metric;                     // of policy.scores
    size_t (*floats)(const policy_head *h); // of memory; NULL: none
    bool ranks;                             // true: after the prefill the `capacity` best tokens by that metric stay
    // Called with a layer's prefill, to learn from it; NULL: nothing is learned.
    void (*see)(policy_head *h, const layer_view *view);
    // Selects which of the T tokens of a prefilled context stay; see policy_prefill. NULL: those that `evict` leaves.
    kvb_status (*prefill)(policy_head *h, const layer_view *view, uint32_t *keep, uint32_t *n_keep, kvb_error *err);
    // As decode_hooks.choose and .attended, for one row: q [group, d], weights [group, span.count]. NULL: everything is
    // looked at; nothing is learned.
    uint32_t (*choose)(policy_head *h, kv_span span, const float *q, uint32_t *indices);
    void (*attended)(policy_head *h, kv_span span, const float *weights);
    // See policy_new_turn. NULL: turns change nothing.
    kvb_status (*turn)(policy_head *h, kv_span span, kvb_error *err);
    // Selects which entries stay after a step. `keep` [span.count] and *n_keep list all of them before. NULL: all stay.
    kvb_status (*evict)(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err);
};

// Writes which of a prefilled context's T tokens stay, ascending, into keep [T], and sets the policy's state. `scores`
// [T] are those of the policy's metric, if kind->ranks.
kvb_status policy_prefill(policy_head *h, const layer_view *view, const float *scores, uint32_t *keep, uint32_t *n_keep,
                          kvb_error *err);
// Writes which entries of `span` stay after a step, ascending, into keep [span.count].
kvb_status policy_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err);

// RocketKV (methods.md 3.6).
typedef struct rocket_split {
    double exponent; // alpha = min(0.2 + 0.06 log2 c, 0.8)
    double keep;     // N, tokens that the first stage keeps, = S / c^alpha
    double second;   // c2 = c^(1 - alpha), what the second stage saves
    uint32_t page;   // p = ceil(sqrt(c2)) if <= c2, else 1
    double channels; // k1 = d p / c2, unrounded
    uint32_t k1, k2; // int(k1) within 1 .. d; floor(t / 2)
} rocket_split;

// Splits a sequence of S tokens, of which `fetched` keys and values may be fetched per KV head and step.
rocket_split rocket_split_for(double S, double fetched, uint32_t head_dim);

// Hybrid sparse attention: pages of `page` keys with each channel's minimum and maximum.
typedef struct hsa {
    uint32_t head_dim, group, page;
    uint32_t n;        // keys absorbed
    float *low, *high; // [pages, d]
} hsa;

void hsa_absorb(hsa *h, const float *key); // adds a key to the last page, or begins the next page with it
// Returns x of one page for query head r: the sum over the picked channels of q_rc times the page's maximum where the
// group's sum of q_c is positive, else times its minimum. With all channels, and if the group's signs agree, it bounds
// q_r k from above for every key of the page (Quest's bound).
float hsa_estimate(const hsa *h, const float *q, uint32_t r, uint32_t page, const uint32_t *picked, uint32_t k1);

// Tells a head that a new turn begins after the entries of `span`. RocketKV-MT then selects its tokens again; other
// policies ignore it.
kvb_status policy_new_turn(policy_head *h, kv_span span, kvb_error *err);
