// Policies evict while tokens are generated, at every step.
//
// A policy is written `name[:parameter=value...]`. What a policy may keep is one number per KV head, its capacity: the
// same for all heads as published, or a table's.
#pragma once
#include "evaluator/cache.h"
#include "profiler/metric/scorer.h"

enum { POLICY_SPEC_MAX = 192 };

typedef struct policy_kind policy_kind;

// The parameters of each policy; policy.c says what a field means.
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
} policy_settings;

typedef struct policy {
    const policy_kind *kind;
    char spec[POLICY_SPEC_MAX]; // canonical text
    policy_settings set;
    metric scores; // the metric that ranks tokens; kind NULL if the policy has its own rule
} policy;

extern const policy_kind *const policy_kinds[];
extern const size_t policy_kind_count;

// Parses a policy; on KVB_ARGUMENT the message lists the known ones.
kvb_status policy_parse(policy *out, const char *text, kvb_error *err);

// ---- One head ----

// One KV head under a policy. Plain memory, so that a copy of it and of its array is a copy of the state.
typedef struct policy_head {
    const policy *p;
    uint32_t layer, kv_head, group, head_dim;
    uint32_t capacity;      // entries that it keeps
    uint32_t n_context;     // T
    uint32_t room;          // entries that the cache may ever hold
    uint32_t counts[2];     // the policy's own counters
    uint64_t looked, steps; // entries attended to, summed over steps
    float *memory;          // kind->floats() numbers
} policy_head;

struct policy_kind {
    spec_row spec; // name and parameters, whose values are in policy.set
    const char *summary;
    unsigned needs;                         // view_items of prefill(), beside those of the metric
    const char *metric;                     // of policy.scores
    size_t (*floats)(const policy_head *h); // of memory; NULL: none
    // Called with a layer's prefill, to learn from it; NULL: nothing is learned.
    void (*see)(policy_head *h, const layer_view *view);
    // Which of the T tokens of a prefilled context stay; see policy_prefill. NULL: those that `evict` leaves.
    kvb_status (*prefill)(policy_head *h, const layer_view *view, uint32_t *keep, uint32_t *n_keep, kvb_error *err);
    // As decode_hooks.attended, for one row: weights [group, span.count]. NULL: nothing is learned.
    void (*attended)(policy_head *h, kv_span span, const float *weights);
    // Which entries stay after a step. `keep` [span.count] and *n_keep list all entries on entry. NULL: all stay.
    kvb_status (*evict)(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err);
};

// Writes which of a prefilled context's T tokens stay, ascending, into keep [T], and sets the policy's state.
kvb_status policy_prefill(policy_head *h, const layer_view *view, uint32_t *keep, uint32_t *n_keep, kvb_error *err);
// Writes which entries of `span` stay after a step, ascending, into keep [span.count].
kvb_status policy_evict(policy_head *h, kv_span span, uint32_t *keep, uint32_t *n_keep, kvb_error *err);
