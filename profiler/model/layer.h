// One transformer layer: what the model does to rows of the residual stream. Written once for the context's prefill,
// for decoded rows and for the evaluator's decoder, which only differ in where keys and values are stored.
//
//     x = layer_embed(ids)
//     for each layer:
//         q_raw, q, keys, values = layer_project(x)     norm, projections, rotary positions
//         attended = ...                                the caller's: attention over its keys and values
//         x = layer_finish(x, attended)                 output projection, residual, feed-forward
//     layer_end(x)                                      checks that the device has done all of this
// Operations report no errors (backend.h): if layer_end does not return KVB_OK, no result of the pass may be used.
#pragma once
#include "profiler/model/model.h"

// What layers need besides the residual stream: the rotary table, and activations that live for one iteration of the
// caller's loop. Shapes count max_rows rows; D, H, G, d, F as in model.h.
typedef struct layer_pass {
    const model *m;
    const backend *b;
    backend_device *on; // with scratch memory for the pass
    uint32_t positions;
    float frequency[ROPE_MAX_PAIRS]; // [rope_dim/2] radians per position, of the present context
    dev cos_sin;                     // [positions, rope_dim/2, 2]
    dev query_cos_sin;               // of queries, if these grow with their position; else {NULL}
    dev local_cos_sin;               // of bounded layers, if theirs differs; else {NULL}
    dev normed;                      // [rows, D] output of a norm
    dev keys, values;                // [rows, G*d] of layer_project, keys after RoPE
    dev attended;                    // [rows, H*d] what the caller's attention leaves for layer_finish
    dev gate, up;                    // [rows, F] of the feed-forward
    dev branch;        // [rows, D] what attention or feed-forward adds, if it is normed or scaled first; else 1 float
    dev router_scores; // [rows, E] if the model has experts; else {NULL}
    dev taken, made;   // [rows, D] an expert's input rows and its output; else {NULL}
    dev logits;        // [64, vocabulary]
} layer_pass;

// The limits that a pass needs from a backend: attention on the device over contexts of up to `tokens` tokens and tails
// of up to `tail`, max_rows rows at a time.
backend_limits layer_limits(const model *m, uint32_t tokens, uint32_t tail, uint32_t max_rows);

// Opens a device for these limits, with memory for limits->rows rows at a time at positions below `positions`. The
// device is opened last: weights that do not fit into its memory are streamed through what is then left, so callers
// must allocate their memory first. On failure nothing is held.
kvb_status layer_pass_open(layer_pass *p, const model *m, const backend_limits *limits, uint32_t positions,
                           kvb_error *err);
// Frees everything; a zero pass is allowed.
void layer_pass_close(layer_pass *p);
// Bytes of device memory that layer_pass_open takes, without the backend's scratch memory.
uint64_t layer_pass_bytes(const model *m, uint32_t max_rows, uint32_t positions);

// Sets the rotary table for a context of n_tokens tokens and everything after it; the default is that of short
// contexts. Only some kinds of scaling depend on the length (rope.h).
void layer_begin_context(layer_pass *p, uint32_t n_tokens);

// Fails with KVB_ARGUMENT if one of ids [n] is outside the vocabulary.
kvb_status layer_check_ids(const layer_pass *p, const int32_t *ids, uint32_t n, kvb_error *err);

// x [n, D] = the embeddings of ids, which must have been checked.
void layer_embed(const layer_pass *p, dev x, const int32_t *ids, uint32_t n);

// Computes queries before and after RoPE, q_raw and q [n, H*d], of n <= max_rows rows x [n, D] at `positions` [n]
// (host); their keys and values go to p->keys and p->values.
void layer_project(const layer_pass *p, uint32_t layer, dev q_raw, dev q, dev x, const uint32_t *positions, uint32_t n);

// x [n, D] += attention's share of p->attended and then the feed-forward's, the latter `piece` rows at a time (0: all
// at once).
void layer_finish(const layer_pass *p, uint32_t layer, dev x, uint32_t n, uint32_t piece);

// y [n, D] = p->attended times the layer's W_O: attention's contribution alone.
void layer_project_output(const layer_pass *p, uint32_t layer, dev y, uint32_t n);

// How logits are used: they are copied to the host, or tokens are drawn from them on the device.
typedef struct logit_use {
    float *logits; // [rows, vocabulary]; NULL: draw
    const sampler *s;
    const draw_key *keys; // [rows]
    int32_t *drawn;       // [rows]
} logit_use;

// Computes the logits of rows x [n, D], which are rows `at` and following of `use`.
void layer_logits(const layer_pass *p, dev x, uint32_t n, const logit_use *use, size_t at);

// Must end every pass. Returns the first failed operation's error, if any; then nothing that the pass wrote may be
// used.
kvb_status layer_end(const layer_pass *p, kvb_error *err);

// Selects the `used` largest of logits [n] (of equal ones the lower number) and their weights: the softmax over all n,
// or, if `normed`, over the selected ones. used <= n.
void experts_choose(const float *logits, uint32_t n, uint32_t used, bool normed, uint32_t *numbers, float *weights);
