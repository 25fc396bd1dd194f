// THE layer: what the model does to rows of the residual stream, written once for the context's prefill, for decoded
// rows and for the evaluator's decoder, which differ in where keys and values lie and in nothing else.
//
//     x = layer_embed(ids)
//     for each layer:
//         q_raw, q, keys, values = layer_project(x)     norm, projections, rotary positions
//         attended = ...                                the caller's: attention over its keys and values
//         x = layer_finish(x, attended)                 output projection, residual, feed-forward
//     layer_end(x)                                      logits, and whether the device has done all of this
//
// Operations report nothing (backend.h): a pass whose layer_end was not KVB_OK has made nothing that may be used.
#pragma once
#include "profiler/model/model.h"

// What layers need beside the stream: the rotary table, and activations that live for one call of the caller's loop.
// Shapes count max_rows rows; D, H, G, d, F as in model.h.
typedef struct layer_pass {
    const model *m;
    const backend *b;
    backend_device *on; // with scratch memory for the pass
    uint32_t positions;
    float frequency[ROPE_MAX_PAIRS]; // [rope_dim/2] radians per position, of the present context
    dev cos_sin;                     // [positions, rope_dim/2, 2]
    dev query_cos_sin;               // of queries, where they grow with their position; else {NULL}
    dev local_cos_sin;               // of bounded layers, where theirs is another; else {NULL}
    dev normed;                      // [rows, D] what a norm gave
    dev keys, values;                // [rows, G*d] of layer_project, keys after RoPE
    dev attended;                    // [rows, H*d] what the caller's attention leaves for layer_finish
    dev gate, up;                    // [rows, F] of the feed-forward
    dev branch;        // [rows, D] what attention or feed-forward adds, where that is normed or scaled first; else one
    dev router_scores; // [rows, E], where the model has experts; else {NULL}
    dev taken, made;   // [rows, D] rows of one expert, and what it makes of them; the same
    dev logits;        // [64, vocabulary]
} layer_pass;

// What a pass asks of a backend: contexts of up to `tokens` and tails of up to `tail` for attention on the device,
// max_rows rows at a time.
backend_limits layer_limits(const model *m, uint32_t tokens, uint32_t tail, uint32_t max_rows);

// A device for these limits, and memory for limits->rows rows at a time, at positions below `positions`. The device
// comes last: weights that do not fit into its memory are streamed through what is left then, so callers take theirs
// before. On failure nothing is held.
kvb_status layer_pass_open(layer_pass *p, const model *m, const backend_limits *limits, uint32_t positions,
                           kvb_error *err);
// Gives all back; a zero pass is allowed.
void layer_pass_close(layer_pass *p);
// Bytes of device memory that layer_pass_open takes, scratch of the backend aside.
uint64_t layer_pass_bytes(const model *m, uint32_t max_rows, uint32_t positions);

// Sets the rotary table for a context of n_tokens tokens and all that follows it; until then it is that of short ones.
// Only some kinds of scaling depend on it (rope.h). KVB_MEMORY.
kvb_status layer_begin_context(layer_pass *p, uint32_t n_tokens, kvb_error *err);

// KVB_ARGUMENT where one of ids [n] is outside of the vocabulary.
kvb_status layer_check_ids(const layer_pass *p, const int32_t *ids, uint32_t n, kvb_error *err);

// x [n, D] = the embeddings of ids, which were checked.
void layer_embed(const layer_pass *p, dev x, const int32_t *ids, uint32_t n);

// Queries before and after RoPE, q_raw and q [n, H*d], of n <= max_rows rows x [n, D] at `positions` [n] (host); their
// keys and values go to p->keys and p->values.
void layer_project(const layer_pass *p, uint32_t layer, dev q_raw, dev q, dev x, const uint32_t *positions, uint32_t n);

// x [n, D] += attention's share of p->attended and then the feed-forward's, the latter `piece` rows at a time (0: all
// at once).
void layer_finish(const layer_pass *p, uint32_t layer, dev x, uint32_t n, uint32_t piece);

// y [n, D] = p->attended times the layer's W_O: what attention alone would add.
void layer_project_output(const layer_pass *p, uint32_t layer, dev y, uint32_t n);

// What becomes of logits: they go to the host, or tokens are drawn from them where they are.
typedef struct logit_use {
    float *logits; // [rows, vocabulary]; NULL: draw
    const sampler *s;
    const draw_key *keys; // [rows]
    int32_t *drawn;       // [rows]
} logit_use;

// Logits of the rows x [n, D], which are the use's rows from `at` on.
void layer_logits(const layer_pass *p, dev x, uint32_t n, const logit_use *use, size_t at);

// Every pass ends here: has the device done all that was asked? What it was that failed, else; then nothing that the
// pass has written is of use.
kvb_status layer_end(const layer_pass *p, kvb_error *err);

// The `used` largest of logits [n], equal ones by number, and their weights: the softmax of all n, or, normed, of these
// alone. used <= n.
void experts_choose(const float *logits, uint32_t n, uint32_t used, bool normed, uint32_t *numbers, float *weights);
