// A policy at work: one sequence, every head of the model.
//
//     policy_run_open       capacities per head
//     policy_run_observer   hand it to session_prefill (policy_watch for several runs at once)
//     policy_run_cache      the cache after the prefill
//     decoder_run           one token at a time, with policy_run_hooks
//     policy_run_restart    the state as after the prefill, for another question and another copy of that cache
#pragma once
#include "evaluator/policy.h"
#include "evaluator/session.h"

typedef struct policy_run policy_run;

// capacity [L*G], for a context of n_tokens and at most `extra` tokens behind it; `ratio` is what was asked for
// (policy_capacity_ratio). The policy lives as long as the run. On failure *out is NULL.
kvb_status policy_run_open(policy_run **out, const policy *p, const model *m, const uint32_t *capacity, double ratio,
                           uint32_t n_tokens, uint32_t extra, kvb_error *err);
void policy_run_close(policy_run *run);

// Shows a prefill to n runs.
typedef struct policy_watch {
    policy_run *const *runs;
    size_t n;
} policy_watch;
layer_observer policy_observer(policy_watch *watch);

// What stays of the context, as a cache with room for `extra` tokens, and the state behind it. A policy that reads
// blocks (policy_reads_blocks) sends the context through the model again, over a new cache.
kvb_status policy_run_cache(policy_run *run, session *s, uint32_t extra, kv_cache **out, kvb_error *err);
// The context in blocks, over what the policy kept of those before, so that never more than capacity + block entries
// exist. For policies that need nothing but keys and values (KVB_UNSUPPORTED else).
kvb_status policy_run_blocks(policy_run *run, decoder *d, const int32_t *ids, uint32_t n, uint32_t extra,
                             kv_cache **out, kvb_error *err);
// What stays of the context after a prefill with full attention; borrowed.
const kept_set *policy_run_kept(const policy_run *run);

decode_hooks policy_run_hooks(policy_run *run);
void policy_run_restart(policy_run *run);
// A new turn begins behind what the cache holds.
kvb_status policy_run_turn(policy_run *run, const kv_cache *c, kvb_error *err);

typedef struct policy_stats {
    double kept;   // entries in the cache after a step, mean over heads, at most over steps
    double looked; // entries attended to, mean over heads and steps since the run was opened
    double peak;   // entries in the cache during a step, mean over heads, at most over steps
} policy_stats;
policy_stats policy_run_stats(const policy_run *run);
