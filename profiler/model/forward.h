// The forward pass: prefill of a few contexts, then decoding of many questions at once over their contexts' shared keys
// and values.
#pragma once
#include "profiler/model/model.h"
#include "profiler/model/observe.h"

// Prefilled contexts and the batch of questions that is decoded over them. Memory grows with T, never with T squared.
typedef struct forward forward;

typedef struct forward_plan {
    uint32_t max_tokens;    // longest context, T
    uint32_t max_questions; // questions in one batch
    uint32_t max_tail;      // suffix and generated tokens per question
    bool oracle;            // keep importance accumulators [questions, B, G, T]
    bool output;            // importance is ORACLE_OUTPUT's (profile.h), which needs sums_importance; otherwise LU-KV's
                            // maximum
    uint32_t places; // contexts that are held at a time: 1, or more without forward_keep_queries if angles do not
                     // depend on a context's length (rope_depends_on_length)
} forward_plan;

// Bytes of device memory that forward_open will take, without the backend's scratch memory.
uint64_t forward_bytes(const model *m, const forward_plan *plan);

// The part of these bytes that holds the context's keys and values.
uint64_t forward_cache_bytes(const model *m, const forward_plan *plan);

// Bytes of the backend's scratch memory.
uint64_t forward_scratch_bytes(const model *m, const forward_plan *plan);

kvb_status forward_open(forward **out, const model *m, const forward_plan *plan, kvb_error *err);
void forward_close(forward *f);

// Sets the place, below plan.places, whose context the next prefill replaces; at first 0.
void forward_set_place(forward *f, uint32_t place);

// Runs the context's ids [n_tokens], caches keys and values, and prepares the oracle's weights (methods.md 2.1).
// `observer` (NULL: none) sees every layer once; `progress` (NULL: none) is called after every layer and may stop the
// prefill by returning false. `logits` (NULL: none) receives [n_tokens, vocabulary].
typedef struct forward_progress {
    bool (*step)(void *context, double done, double total);
    void *context;
} forward_progress;
kvb_status forward_prefill(forward *f, const int32_t *ids, uint32_t n_tokens, const layer_observer *observer,
                           const forward_progress *progress, float *logits, kvb_error *err);

// Discards all tails and importance but keeps the contexts. Questions take the slots 0..n_questions-1; `places`
// [n_questions] are those of their contexts, or NULL: all are of the last one that was prefilled.
void forward_begin_questions(forward *f, const uint32_t *places, uint32_t n_questions);

// Runs rows through the model: row i is token ids[i] of its question at position T + tail. The rows of a question are
// consecutive and in order, and its earlier tail rows must have been run before. Observed rows enter the oracle. A
// row's bits do not depend on the other rows. For each row logit_rows[i], which ascend, the logits [vocabulary] go to
// logits + i * vocabulary (host).
kvb_status forward_rows(forward *f, const decode_row *rows, const int32_t *ids, uint32_t n_rows,
                        const uint32_t *logit_rows, uint32_t n_logits, float *logits, kvb_error *err);

// The same, but draws a token from each listed row's logits on the device: drawn[i] = sampler_draw(s, row i's logits,
// keys[i]).
kvb_status forward_draw(forward *f, const decode_row *rows, const int32_t *ids, uint32_t n_rows,
                        const uint32_t *logit_rows, uint32_t n_drawn, const sampler *s, const draw_key *keys,
                        int32_t *drawn, kvb_error *err);

// Copies one question's importance I [B, G, T], of the budgeted layers (model_budgeted), to the host. Returns the
// device's error if an operation has failed.
kvb_status forward_importance(const forward *f, uint32_t question, float *out, kvb_error *err);

// Keeps the queries of up to `per_question` rows of each question from here on, until forward_close, for the output
// errors of loss_pass.h.
void forward_keep_queries(forward *f, uint32_t per_question);
// Sets the rows whose queries the next forward_rows or forward_draw keeps, by ascending index. forward_begin_questions
// discards all kept queries.
void forward_keep_rows(forward *f, const uint32_t *rows, uint32_t n);
