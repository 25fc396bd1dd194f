// The state of a forward pass, shared by forward.c and loss_pass.c.
#pragma once
#include "profiler/model/forward.h"
#include "profiler/model/layer.h"
#include "profiler/model/layer_views.h"

// The most rows in one call of a layer; backends may take a context in smaller pieces (context_rows). Decoded rows are
// fewer than a chunk, so that their bits do not depend on their number.
enum { CHUNK_ROWS = BACKEND_CHUNK_ROWS, DECODE_ROWS = CHUNK_ROWS - 64 };

// What loss_pass.c judges outputs with: queries, and the context's keys and values if the pass itself only packs them.
typedef struct kept_queries {
    uint32_t per_question, n_kept, max_kept;
    uint32_t *slot, *tail; // [max_kept] of the queries kept so far
    dev queries;           // [B, max_kept, H*d]
    uint32_t *rows;        // [n_rows] rows of the next call whose queries are kept
    uint32_t n_rows, room;
    uint32_t *local, n_local, base; // of these, those in the current chunk; its kept queries begin with number `base`
    dev k, v;                       // [B, G, T, d] if the context is packed; else {NULL}
    float *grams;                   // [B, G, group d, group d], of loss_pass.c; NULL: not made yet
} kept_queries;

struct forward {
    const model *m;
    const backend *b;
    forward_plan plan;
    uint32_t n_tokens, place; // T of the present context, and its place
    uint32_t *held;           // [places] T of each
    // Contexts, one after the other with room for max_tokens each; the arrays of one are packed for its T.
    dev k, v;    // [places, L, G, T, d]; only [G, T, d] of the layer being prefilled if there is `packed`
    dev packed;  // [places, L] the backend's packed form of them; {NULL} if it does not pack
    dev weights; // oracle's w [places, B, H, T], of the layers that are budgeted (model_budgeted)
    dev centre;  // [H, d] a layer's mean output, with plan.output
    // Questions.
    uint32_t *place_of; // [max_questions] their contexts' places
    dev tail_k, tail_v; // [L, max_questions, G, max_tail, d]
    dev best;           // I [questions, B, G, T], packed for T in the room for max_tokens
    // Activations.
    dev x;               // [max(T, CHUNK_ROWS), D] residual stream
    dev q_raw, q;        // [max(T, CHUNK_ROWS), H*d]
    dev picked;          // [CHUNK_ROWS, D] rows whose logits are wanted
    layer_pass pass;     // for CHUNK_ROWS rows at positions below max_tokens + max_tail
    uint32_t *positions; // [max(T, CHUNK_ROWS)] host
    layer_views views;
    kept_queries *kept; // NULL: no queries are kept
};

prefix_kv forward_prefix(const forward *f, uint32_t layer);
tail_kv forward_tails(const forward *f, uint32_t layer);
