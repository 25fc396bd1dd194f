// How a cache is made smaller, and by whom its budgets are granted: what a sweep over texts and a run of tasks compare.
#pragma once
#include "evaluator/allocator.h"
#include "evaluator/policy_run.h"

// Evicts a context once, ranked by a metric; or acts at every step, as a policy.
typedef struct method {
    metric m;              // kind NULL: a policy
    policy p;              // kind NULL: a metric
    uint32_t sink, window; // of a metric: what every allocator protects. A policy has its own way
} method;

// "snapkv:kvpress", "morphkv:window=8".
const char *method_name(const method *m);

// A method in use with an allocator. Tables serve the metric that they were solved for; policies take any, but no
// allocator that needs scores, which are not there when a policy begins.
typedef struct method_column {
    uint32_t method;
    const allocator *how;
} method_column;

// Methods of a run, metrics before policies, so that session.scores[i] are those of methods[i].
typedef struct method_list {
    const method *methods;
    uint32_t n;
    const method_column *columns;
    uint32_t n_columns;
} method_list;

// The metrics of a list, for session_plan; malloc'd, *n of them.
metric *method_metrics(size_t *n, const method_list *list);

// Whether an allocator of a list needs session_plan.attention.
bool method_needs_attention(const method_list *list);

// Of a metric: budgets for the session's context at a pruned ratio, and the tokens that it picks with them.
// `importance` [L, G, T] is the oracle's, for that allocator alone (NULL: KVB_ARGUMENT). The
// caller frees *out.
kvb_status method_select(session *s, const method_list *list, const method_column *column, double ratio,
                         const float *importance, kept_set *out, kvb_error *err);

// Of a policy: capacities by the allocator, and a run for a context of n_tokens and `extra` tokens behind it.
kvb_status method_policy(policy_run **out, const model *m, const method_list *list, const method_column *column,
                         double ratio, uint32_t n_tokens, uint32_t extra, kvb_error *err);
