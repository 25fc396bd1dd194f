// One context at a time: prefilled with full attention and scored by every metric, then cut to any number of caches.
//
//     session_open            model and metrics; memory for the longest context
//     session_prefill         keys, values and scores of a context, once
//     session_reference       logits and oracle importance with the full cache, for a given continuation
//     session_select          scores + tokens per head -> kept positions
//     session_cache           kept positions -> a compacted ragged cache
//     session_refit           what that cache holds, refitted
//     decoder_run             one step, or a whole continuation, over any batch of such caches
#pragma once
#include "evaluator/decoder.h"
#include "evaluator/window_attention.h"
#include "profiler/metric/scorer.h"
#include "profiler/model/references.h"

typedef struct session_plan {
    uint32_t max_tokens;   // longest context, T
    uint32_t max_new;      // positions after the context
    uint32_t max_rows;     // rows that the decoder runs in one call, over all sequences
    const metric *metrics; // must live as long as the session
    size_t n_metrics;
    bool oracle;    // session_reference will be asked for importance
    bool attention; // allocators will ask for session.attention
    uint32_t refit; // reference queries per KV head for session_refit; 0: no refitting
} session_plan;

// The result of a prefill.
typedef struct session_context {
    uint32_t n_tokens; // T
    float *k, *v;      // [L, G, T, d] on the host, keys after RoPE
    float **scores;    // [n_metrics][L, G, T]
    float **first;     // [n_metrics][L, G, T] of the metric that a two-stage metric wraps; NULL for all others
    size_t n_metrics;
    float *queries; // reference queries for refitting; NULL in session.now, since session.refit holds them
} session_context;

typedef struct session {
    const model *m;
    session_plan plan;
    forward *prefill;
    decoder *decode;
    session_context now;                 // the current context
    float *ranked;                       // [L, G, T], of session_rank; NULL if no metric needs it
    window_attention attention;          // of the context that was prefilled last; zero unless planned
    references refit;                    // zero unless planned
    double score_seconds, refit_seconds; // spent in scorers and in refitting, over all contexts
} session;

// Opens a session with a model, which must outlive it. On failure *out is NULL.
kvb_status session_open(session **out, const model *m, const session_plan *plan, kvb_error *err);
void session_close(session *s);

// Prefills a context and fills k, v and scores of session.now. `also` (NULL: none) observes every layer too.
kvb_status session_prefill(session *s, const int32_t *ids, uint32_t n_tokens, const layer_observer *also,
                           const forward_progress *progress, kvb_error *err);

// Teacher-forces n <= max_new tokens after the full context, in one call of the profiler's forward pass (not of the
// decoder). `importance` (NULL: none; needs plan.oracle) receives I [L, G, T] over these n queries; `logits` (NULL:
// none) [n, vocabulary].
kvb_status session_reference(session *s, const int32_t *ids, uint32_t n, float *importance, float *logits,
                             kvb_error *err);

// Sets *scores to the scores [L, G, T] by which metric `i` picks keep[h] tokens for every head: session.now.scores[i],
// or, if its order depends on the budget (metric_rank), memory that the next call overwrites.
kvb_status session_rank(session *s, size_t i, const uint32_t *keep, const float **scores, kvb_error *err);

// Selects the keep[h] best tokens of every head by scores [L, G, T] (session.now.scores[i], or any others), sinks and
// window first (kvb_select_all). The caller frees *out with kept_set_free.
kvb_status session_select(const session *s, const float *scores, const uint32_t *keep, uint32_t sink, uint32_t window,
                          kept_set *out, kvb_error *err);

// Opens a cache of what `kept` lists of the prefilled context (NULL: the whole context), with room for `extra` more
// tokens. The caller closes it.
kv_cache *session_cache(const session *s, const kept_set *kept, uint32_t extra);

// Does the same, reusing the memory of *cache, an earlier cache of this model (NULL: none yet).
void session_cache_again(const session *s, const kept_set *kept, uint32_t extra, kv_cache **cache);

// Refits a cache that was cut to `kept` of the prefilled context, if that was planned and `kept` is not NULL. Heads
// that keep more than half of it are not changed, nor are layers without plain attention (references.h). The bits do
// not depend on the number of threads. Fails with KVB_NUMERIC if the model's numbers are not finite.
kvb_status session_refit(session *s, const kept_set *kept, kv_cache *cache, kvb_error *err);

// ---- Many contexts, all but one held outside the session ----

// Allocates memory for a context of the session's longest length, for the same metrics. The caller frees it with
// session_context_free, which accepts a zero struct.
session_context session_context_open(const session *s);
void session_context_free(session_context *c);
// Returns the bytes that one takes.
uint64_t session_context_bytes(const model *m, const session_plan *plan);
// Swaps it with the session's current context; nothing is copied. The session's next calls work on that context.
void session_exchange(session *s, session_context *c);
