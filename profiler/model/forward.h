// The forward pass: prefill of one context, then decoding of many questions at once over that context's shared keys and
// values.
#pragma once
#include "profiler/model/model.h"
#include "profiler/model/observe.h"

// One prefilled context and the batch of questions that is decoded over it. Memory grows with T, never with T squared.
typedef struct forward forward;

typedef struct forward_plan {
    uint32_t max_tokens;    // longest context, T
    uint32_t max_questions; // questions in one batch
    uint32_t max_tail;      // suffix and generated tokens per question
    bool oracle;            // keep importance accumulators [questions, B, G, T]
    bool output;            // of ORACLE_OUTPUT (profile.h), which needs sums_importance; otherwise LU-KV's maximum
} forward_plan;

// Bytes of device memory that forward_open will take, scratch of the backend aside.
uint64_t forward_bytes(const model *m, const forward_plan *plan);

// Bytes among them of the context's keys and values.
uint64_t forward_cache_bytes(const model *m, const forward_plan *plan);

// Bytes of that scratch.
uint64_t forward_scratch_bytes(const model *m, const forward_plan *plan);

kvb_status forward_open(forward **out, const model *m, const forward_plan *plan, kvb_error *err);
void forward_close(forward *f);

// Runs the context's ids [n_tokens], caches keys and values, and prepares the oracle's weights (methods.md 2.1).
// `observer` (NULL: none) sees every layer once; `progress` (NULL: none) is told the layers done and may ask to stop by
// returning false. `logits` (NULL: none) receives [n_tokens, vocabulary].
typedef struct forward_progress {
    bool (*step)(void *context, double done, double total);
    void *context;
} forward_progress;
kvb_status forward_prefill(forward *f, const int32_t *ids, uint32_t n_tokens, const layer_observer *observer,
                           const forward_progress *progress, float *logits, kvb_error *err);

// Forgets all tails and importance; the context stays. Questions take the slots 0..n_questions-1.
void forward_begin_questions(forward *f, uint32_t n_questions);

// Runs rows through the model: row i is token ids[i] of its question at position T + tail. The rows of a question stand
// together and in order, and each question's earlier tail rows were run before. Observed rows enter the oracle. For
// each listed row the logits [vocabulary] go to logits + i * vocabulary (host).
kvb_status forward_rows(forward *f, const decode_row *rows, const int32_t *ids, uint32_t n_rows,
                        const uint32_t *logit_rows, uint32_t n_logits, float *logits, kvb_error *err);

// The same, but a token is drawn from each listed row's logits, where they are: drawn[i] = sampler_draw(s, row i's
// logits, keys[i]).
kvb_status forward_draw(forward *f, const decode_row *rows, const int32_t *ids, uint32_t n_rows,
                        const uint32_t *logit_rows, uint32_t n_drawn, const sampler *s, const draw_key *keys,
                        int32_t *drawn, kvb_error *err);

// Copies the importance I [B, G, T] of one question, of the layers that are budgeted (model_budgeted), to the host.
// Fails with what the device has failed with.
kvb_status forward_importance(const forward *f, uint32_t question, float *out, kvb_error *err);
