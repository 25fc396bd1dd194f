// Measures what evicting does to a model's predictions of how a text continues: the same continuation is teacher-forced
// over the full cache, and over compacted ones in batches.
//
// Question-agnostic, as kvpress evaluates: the context is prefilled with full attention and compressed without knowing
// what follows.
#pragma once
#include "evaluator/policy_run.h"
#include "evaluator/predictions.h"

// One text: its context, prefilled, and what the full cache says about its continuation.
typedef struct fidelity {
    session *s;        // borrowed
    uint32_t n_next;   // n, teacher-forced rows
    uint32_t batch;    // cells that are decoded together
    float *importance; // I [L, G, T] over the continuation: the oracle in hindsight
    predictions full;
    float *cell_logits; // [batch, n, vocabulary]; for policies one step's [FIDELITY_POLICIES, vocabulary]
} fidelity;

// What one set of kept positions costs. Arrays belong to the struct (fidelity_cell_free).
typedef struct fidelity_cell {
    uint64_t kept;      // entries over all heads
    double ratio;       // 1 - kept / (L G T) over the layers that have a budget: what is really pruned
    uint64_t bytes;     // keys and values that are kept, before the continuation
    uint64_t allocated; // bytes that the cache allocated: these, positions and offsets
    double loss;        // share of the oracle importance over this continuation that was evicted before it
    double *kl;         // [n] KL(full || evicted) in nats of each next-token distribution
    double *nll;        // [n - 1] -log p(true next token)
    double *agree;      // [n] 1: the likeliest token is the same
    double looked;      // share of the context's entries that a policy attends to per step; NaN without one
    double full_nll;    // mean nll of the full cache
    double seconds;     // this cell's share of the time
} fidelity_cell;

// Opens a measurement for contexts of at most the session's max_tokens, continued by n_next >= 2 tokens. batch * n_next
// must be <= the session's max_rows, n_next <= its max_new, and its plan must have the oracle. On failure *out is NULL.
kvb_status fidelity_open(fidelity **out, session *s, uint32_t n_next, uint32_t batch, kvb_error *err);
void fidelity_close(fidelity *f);

// Prefills ids[0 .. n_tokens-1], scores them, and runs ids[n_tokens .. n_tokens + n_next - 1] over the full cache.
// `also` (NULL: none) observes the prefill too, for policies.
kvb_status fidelity_begin(fidelity *f, const int32_t *ids, uint32_t n_tokens, const layer_observer *also,
                          const forward_progress *progress, kvb_error *err);

// Evicts, refits where the session plans it, compacts and decodes n <= batch sets of kept positions. On failure nothing
// has to be freed.
kvb_status fidelity_measure(fidelity *f, const kept_set *kept, uint32_t n, fidelity_cell *out, kvb_error *err);

enum { FIDELITY_POLICIES = 16 }; // at most so many step together

// Measures n <= FIDELITY_POLICIES policies, which saw the prefill: the continuation begins a new turn and goes in token
// by token, and the policies act at every step. Needs a session with max_rows >= FIDELITY_POLICIES.
kvb_status fidelity_follow(fidelity *f, policy_run *const *runs, uint32_t n, fidelity_cell *out, kvb_error *err);

// Allocates zeroed results of n rows; the caller frees them with fidelity_cell_free.
fidelity_cell fidelity_cell_open(uint32_t n);
void fidelity_cell_free(fidelity_cell *c); // a zero struct is allowed
