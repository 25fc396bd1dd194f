// What a scorer may look at. The forward pass fills one view per layer of the context's prefill and never lets an
// observer change it.
//
// | item              | name         | shape, row-major | what                                                        |
// |-------------------|--------------|------------------|-------------------------------------------------------------|
// | VIEW_Q_RAW        | q_raw        | [n, H, d]        | queries before RoPE (after bias and norm, if there are any) |
// | VIEW_Q            | q            | [n, H, d]        | queries after RoPE                                          |
// | VIEW_K            | k            | [G, T, d]        | keys after RoPE, as cached                                  |
// | VIEW_V            | v            | [G, T, d]        | values, as cached                                           |
// | VIEW_COLUMN_SUMS  | column_sums  | [H, T]           | sum over all T queries i >= j of the attention A[h,i,j]     |
// | VIEW_OUTPUT_NORMS | output_norms | [H, T]           | 1-norm of v_j W_O^(h)                                       |
//
// An observer names the items it needs; the others are NULL. Pointers are host memory and live until the observer
// returns.
// After a prefill there are n = T queries, and key j is at position j. A policy that acts during decoding builds its
// own views, one per KV head if caches are ragged (n_kv_heads = 1, n_heads = group): then the n queries are the latest
// ones, `positions` gives the keys' positions, and `first_kv_head` the head's number in the layer.
#pragma once
#include "runtime/kvbudget.h"
#include <stdint.h>

typedef enum view_item {
    VIEW_Q_RAW = 1,
    VIEW_Q = 2,
    VIEW_K = 4,
    VIEW_V = 8,
    VIEW_COLUMN_SUMS = 16,
    VIEW_OUTPUT_NORMS = 32,
} view_item;

typedef struct layer_view {
    uint32_t layer;
    uint32_t n_tokens, n_heads, n_kv_heads, head_dim, rope_dim; // T, H, G, d
    float scale;                                                // of q . k; 0: 1/sqrt(d) (view_scale says which)
    const float *rope_frequency;                                // [rope_dim/2], radians per position
    float rope_attention; // cosines and sines are multiplied with it (yarn, longrope); 0: 1
    uint32_t window;      // positions that the layer's queries see; 0: all. A layer with a window is not scored, and
                          // column_sums is NULL
    float softcap;        // as in attention_shape: applied to q . k before the softmax; 0: none
    const float *sinks;   // [H] an extra score per query head that enters the softmax but belongs to no position; NULL:
                          // none
    const float *q_raw, *q, *k, *v;
    const float *column_sums, *output_norms;
    uint32_t n_queries;        // rows of q_raw and q: the queries of the last n_queries tokens
    const uint32_t *positions; // [G, T] of the keys, ascending per head; NULL: key j is at position j
    uint32_t first_kv_head;    // the layer's head that is the view's head 0
    double extra_seconds;      // time spent on column_sums and output_norms
} layer_view;

// Returns the factor by which products of queries and keys are multiplied.
double view_scale(const layer_view *v);

// Called once per layer, in order. A status other than KVB_OK stops the prefill.
typedef struct layer_observer {
    kvb_status (*see)(void *context, const layer_view *view, kvb_error *err);
    void *context;
    unsigned needs; // view_items, or-ed
} layer_observer;
