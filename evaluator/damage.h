// Measures what cutting a context's cache does to the model's predictions, for many cuts of the same texts. Keys,
// values, scores and the full cache's predictions of a text are computed once; each cut then takes one pass of the
// continuation over a compacted cache, and many cuts share a batch. fidelity.h also measures lost importance and
// memory.
#pragma once
#include "evaluator/predictions.h"
#include "evaluator/session.h"

typedef struct damage_plan {
    uint32_t n_tokens, n_next; // context and continuation of every text, tokens; n_next at least 2
    uint32_t batch;            // cuts that are decoded together, at least 1
    const metric *by;          // ranks the tokens; lives as long as the damage
    uint32_t sink, window;     // first and last tokens that are kept before any other
    uint32_t refit;            // reference queries per KV head with which every cut is refitted; 0: no refitting
} damage_plan;

typedef struct damage damage;

// One text, opened separately so that any number can be held at once.
typedef struct damage_text {
    session_context context;
    predictions full;
} damage_text;

// Means over the continuation's rows, all against the full cache.
typedef struct damage_value {
    double kl;    // nats
    double flips; // share of rows whose likeliest token changed
    double nll;   // rise in NLL of the true next tokens, nats; may be negative
} damage_value;

// Opens a measurement with a model, which must outlive it. On failure *out is NULL.
kvb_status damage_open(damage **out, const model *m, const damage_plan *plan, kvb_error *err);
void damage_close(damage *d); // NULL is allowed
// Returns the bytes that one text takes while it is open.
uint64_t damage_text_bytes(const model *m, const damage_plan *plan);

// Allocates a text; the caller frees it with damage_text_close, which accepts a zero struct.
damage_text damage_text_open(const damage *d);
void damage_text_close(damage_text *t);
// Prefills the context ids[0 .. n_tokens-1], scores it, and runs the n_next tokens that follow it over the full cache.
// A text may be filled again with other ids.
kvb_status damage_text_fill(damage *d, damage_text *t, const int32_t *ids, const forward_progress *progress,
                            kvb_error *err);

// A cut of a filled text: head h keeps keep[h] tokens, [L*G].
typedef struct damage_cut {
    damage_text *text;
    const uint32_t *keep;
    damage_value *out;
    const uint8_t *formats; // [L*G, 2] in which the kept tokens are stored; NULL: as floats
} damage_cut;

// Measures n cuts, of one text or of several. A cut's result has the same bits whatever else is in the batch and for
// any number of threads; a cut that keeps everything gives exactly 0.
kvb_status damage_measure_cuts(damage *d, const damage_cut *cuts, size_t n, kvb_error *err);
// The same for n cuts of one text: head h of cut i keeps keep[i * L*G + h] tokens. formats [n, L*G, 2] or NULL, out
// [n].
kvb_status damage_measure(damage *d, damage_text *t, const uint32_t *keep, const uint8_t *formats, size_t n,
                          damage_value *out, kvb_error *err);

// Cuts one head at a time: out[i * L*G + h] is the damage when head h alone is cut to keep[i * L*G + h] tokens and all
// other heads keep everything. (KL roughly adds up over heads.) A head that keeps everything is not run, and only
// layers from the cut one on are computed. `progress` (NULL: none) is called after every layer and may stop the run.
kvb_status damage_measure_heads(damage *d, damage_text *t, const uint32_t *keep, uint32_t n, damage_value *out,
                                const forward_progress *progress, kvb_error *err);
