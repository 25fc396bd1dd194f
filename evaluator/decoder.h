// Decoding over ragged caches: a batch of sequences, each with a cache of its own, goes through the weights together.
//
// Products with weights, norms and rotation run on the model's backend; attention runs on the host (attend.h), because
// the caches are there: policies read and evict on the host between two steps anyway.
#pragma once
#include "evaluator/cache.h"
#include "profiler/model/model.h"

typedef struct decoder decoder;

// What a hook sees: one sequence at one layer, after its new entries were appended and before or after its attention.
typedef struct decode_view {
    uint32_t sequence, layer;
    uint32_t n_rows; // new rows of this sequence; the last n_rows entries of every head are theirs
    uint32_t group;  // query heads per KV head
    const float *q;  // [n_rows, H, d] queries after RoPE
    kv_cache *cache; // may be changed in layer_done only, and only at this layer
} decode_view;

// Called while decoding; any may be NULL. choose and attended run in parallel for different (sequence, head), so they
// may write only to what belongs to that pair; layer_done runs alone, once per sequence and layer. A cache with a base
// cannot have hooks: they would only see its own entries.
typedef struct decode_hooks {
    void *context;
    // Which entries a row attends to, at KV head `kv_head`: writes ascending indices (< span.count) to `indices` and
    // returns how many, or UINT32_MAX for all. q [group, d]. Asked only when the sequence has one new row.
    uint32_t (*choose)(void *context, const decode_view *view, uint32_t kv_head, kv_span span, const float *q,
                       uint32_t *indices);
    // What the rows attended to: weights [n_rows * group, span.count], row-major, 0 for entries not attended to.
    void (*attended)(void *context, const decode_view *view, uint32_t kv_head, kv_span span, const float *weights);
    // Called when all heads of a layer are done: entries may be evicted here.
    kvb_status (*layer_done)(void *context, const decode_view *view, kvb_error *err);
} decode_hooks;

typedef enum decode_logits { LOGITS_ALL, LOGITS_LAST } decode_logits; // of every row, or of each sequence's last

// Opens a decoder for at most max_rows rows at once at positions below max_positions. On failure *out is NULL.
kvb_status decoder_open(decoder **out, const model *m, uint32_t max_rows, uint32_t max_positions, kvb_error *err);
void decoder_close(decoder *d);
// Announces that caches decoded from now on belong to a context of n_tokens tokens: some models' rotary positions
// depend on its length.
void decoder_begin_context(decoder *d, uint32_t n_tokens);

// Runs n_rows[s] tokens of every sequence s through the model, in order: ids of sequence 0, then of sequence 1, ...
// They are appended to caches[s], which need that much room, at positions from next_position on. A row sees the cache
// and the rows of its sequence up to itself. `hooks` (NULL: none) [n_sequences], all NULL where a sequence has none.
// `logits` (NULL: none) receives [rows, vocabulary], or [n_sequences, vocabulary] with LOGITS_LAST. After any failure,
// including one of the device, the caches hold useless rows: close them.
kvb_status decoder_run(decoder *d, kv_cache *const *caches, uint32_t n_sequences, const uint32_t *n_rows,
                       const int32_t *ids, const decode_hooks *hooks, decode_logits which, float *logits,
                       kvb_error *err);

// The same in two halves, for sequences that only differ in their upper layers. decoder_run_streams writes the residual
// stream in front of every layer, streams [L, rows, D], and makes no logits. decoder_run_from begins at `layer` with
// `stream` [rows, D], the residual stream in front of it; the caches' lower layers are neither read nor written.
kvb_status decoder_run_streams(decoder *d, kv_cache *const *caches, uint32_t n_sequences, const uint32_t *n_rows,
                               const int32_t *ids, float *streams, kvb_error *err);
kvb_status decoder_run_from(decoder *d, uint32_t layer, const float *stream, kv_cache *const *caches,
                            uint32_t n_sequences, const uint32_t *n_rows, float *logits, kvb_error *err);
