// A method is how a cache is made smaller: a metric or a policy, under an allocator. Sweeps over texts and runs of
// tasks compare methods.
#pragma once
#include "evaluator/allocator.h"
#include "evaluator/policy_run.h"

// Evicts a context once, ranked by a metric; or acts at every step, as a policy.
typedef struct method {
    metric m;              // kind NULL: a policy
    policy p;              // kind NULL: a metric
    uint32_t sink, window; // of a metric: what every allocator protects. Policies have their own rules
} method;

// Returns the method's canonical text: "snapkv:kvpress", "morphkv:window=8".
const char *method_name(const method *m);

// A method with its allocator. A metric's table must be solved for that metric. Policies take any table, but no
// allocator that needs scores, since there are none yet when a policy begins.
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

// Returns the metrics of a list, for session_plan; *n of them, which the caller frees.
metric *method_metrics(size_t *n, const method_list *list);

// Whether an allocator of a list needs session_plan.attention.
bool method_needs_attention(const method_list *list);

// For a metric: computes the budgets for the session's context at a pruned ratio, and selects the tokens. `importance`
// [L, G, T] is only needed for the oracle allocator (KVB_ARGUMENT if it is NULL there). The caller frees *out.
kvb_status method_select(session *s, const method_list *list, const method_column *column, double ratio,
                         const float *importance, kept_set *out, kvb_error *err);

// For a policy: takes capacities from the allocator and opens a run for a context of n_tokens and `extra` more tokens.
kvb_status method_policy(policy_run **out, const model *m, const method_list *list, const method_column *column,
                         double ratio, uint32_t n_tokens, uint32_t extra, kvb_error *err);
