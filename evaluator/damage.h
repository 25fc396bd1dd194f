// What cutting a context's cache costs, for many cuts of the same contexts: keys, values, scores and the full cache's
// predictions of each text are computed once; a cut then costs one continuation over a compacted cache, many in one
// batch. Nothing is measured but the predictions (fidelity.h also has oracle importance and the layers' outputs).
#pragma once
#include "evaluator/predictions.h"
#include "evaluator/session.h"

typedef struct damage_plan {
    uint32_t n_tokens, n_next;          // the longest context and the longest continuation, tokens; n_next at least 2
    uint32_t batch;                     // cuts that are decoded together, at least 1
    const metric *by;                   // ranks the tokens; lives as long as the damage
    uint32_t sink, window;              // first and last tokens that stay before all others
    const query_statistics *statistics; // for a metric that uses stored ones; NULL: none
} damage_plan;

typedef struct damage damage;

// One text, opened by itself so that any number can be held at a time.
typedef struct damage_text {
    session_context context;
    predictions full;
} damage_text;

// What a text is filled with.
typedef struct damage_input {
    const int32_t *ids;        // [n_tokens + n_next]
    uint32_t n_tokens, n_next; // at most the plan's; n_next at least 2
} damage_input;

// Means over the continuation's rows, all against the full cache.
typedef struct damage_value {
    double kl;    // nats
    double flips; // share of rows whose likeliest token is another
    double nll;   // what the true next tokens cost more, nats; may be negative
} damage_value;

// On failure *out is NULL.
kvb_status damage_open(damage **out, const model *m, const damage_plan *plan, kvb_error *err);
void damage_close(damage *d); // NULL is allowed
// Bytes that one text takes while it is open.
uint64_t damage_text_bytes(const model *m, const damage_plan *plan);

// Memory for a text. The caller frees with damage_text_close; a zero struct is allowed there.
damage_text damage_text_open(const damage *d);
void damage_text_close(damage_text *t);
// Prefills the context, scores it, and runs what follows over the full cache. A text may be filled again with another
// input. KVB_ARGUMENT: one that the plan has no room for.
kvb_status damage_text_fill(damage *d, damage_text *t, const damage_input *in, const forward_progress *progress,
                            kvb_error *err);

// A cut of a filled text: head h keeps keep[h] tokens, [L*G].
typedef struct damage_cut {
    damage_text *text;
    const uint32_t *keep;
    damage_value *out;
} damage_cut;

// Measures n cuts, of one text or of several. The same cut has the same bits whatever else is in the batch and however
// many threads there are; a cut that keeps everything costs exactly 0.
kvb_status damage_measure_cuts(damage *d, const damage_cut *cuts, size_t n, kvb_error *err);
// The same of one text, head h of cut i keeping keep[i * L*G + h] tokens: out [n].
kvb_status damage_measure(damage *d, damage_text *t, const uint32_t *keep, size_t n, damage_value *out, kvb_error *err);

// The same of heads one at a time: out[i * L*G + h] is the damage when head h alone is cut, to keep[i * L*G + h]
// tokens, and all others are whole (KL adds up over heads, roughly: docs/refine.md). A head that keeps everything is
// not run. Only the layers from the cut on are computed. `progress` (NULL: none) is asked after every layer.
kvb_status damage_measure_heads(damage *d, damage_text *t, const uint32_t *keep, uint32_t n, damage_value *out,
                                const forward_progress *progress, kvb_error *err);
