// Running a policy: one sequence, every head of the model.
//
//     policy_run_open       capacities per head
//     policy_observer       hand it to session_prefill, for one run or several
//     policy_run_cache      the cache after the prefill
//     decoder_run           one token at a time, with policy_run_hooks
//     policy_run_restart    back to the state after the prefill, for another question and another copy of that cache
#pragma once
#include "evaluator/policy.h"
#include "evaluator/session.h"

typedef struct policy_run policy_run;

// Opens a run with capacity [L*G] tokens per head, for a context of n_tokens and at most `extra` tokens after it.
// `ratio` is the requested share to prune (policy_capacity_ratio). Policy and model must outlive the run. On failure
// *out is NULL.
kvb_status policy_run_open(policy_run **out, const policy *p, const model *m, const uint32_t *capacity, double ratio,
                           uint32_t n_tokens, uint32_t extra, kvb_error *err);
// Lets `table` say at every eviction how many tokens each head keeps, by the rule of growing caches (kvb_growth) with
// the policy's interval: `target` on average. Call it before the prefill. The table must outlive the run.
kvb_status policy_run_grow(policy_run *run, const kvb_table *table, uint32_t target, kvb_error *err);
void policy_run_close(policy_run *run);

// The runs that watch a prefill.
typedef struct policy_watch {
    policy_run *const *runs;
    size_t n;
} policy_watch;
layer_observer policy_observer(policy_watch *watch);

// Opens the cache of what the policy keeps of the context, with room for `extra` more tokens, and restarts the run. The
// caller closes the cache.
kv_cache *policy_run_cache(policy_run *run, const session *s, uint32_t extra);
// Returns what the policy keeps of the context after a prefill with full attention. It belongs to the run.
const kept_set *policy_run_kept(const policy_run *run);

decode_hooks policy_run_hooks(policy_run *run);
void policy_run_restart(policy_run *run);
// Begins a new turn after the entries in the cache.
kvb_status policy_run_turn(policy_run *run, const kv_cache *c, kvb_error *err);

// Returns the number of entries attended to, the mean over heads and over all steps since the run was opened.
double policy_run_looked(const policy_run *run);
