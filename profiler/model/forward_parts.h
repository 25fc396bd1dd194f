// The state of a forward pass, shared by forward.c and loss_pass.c.
#pragma once
#include "profiler/model/forward.h"
#include "profiler/model/layer.h"
#include "profiler/model/layer_views.h"

// The most rows in one call of a layer; backends may take a context in smaller pieces (context_rows). Decoded rows are
// fewer than a chunk, so that their bits do not depend on their number.
enum { CHUNK_ROWS = BACKEND_CHUNK_ROWS, DECODE_ROWS = CHUNK_ROWS - 64 };

struct forward {
    const model *m;
    const backend *b;
    forward_plan plan;
    uint32_t n_tokens; // T of the prefilled context
    // Context, packed for the present T.
    dev k, v;    // [L, G, T, d]; [G, T, d] of the layer that is prefilled where `packed` is there
    dev packed;  // [L] the backend's packed form of them; {NULL} if it does not pack
    dev weights; // oracle's w [B, H, T], of the layers that are budgeted (model_budgeted)
    dev centre;  // [H, d] a layer's mean output, with plan.output
    // Questions.
    dev tail_k, tail_v; // [L, max_questions, G, max_tail, d]
    dev best;           // I [questions, B, G, T], packed for the present T
    // Activations.
    dev x;               // [max(T, CHUNK_ROWS), D] residual stream
    dev q_raw, q;        // [max(T, CHUNK_ROWS), H*d]
    dev picked;          // [CHUNK_ROWS, D] rows whose logits are wanted
    layer_pass pass;     // for CHUNK_ROWS rows at positions below max_tokens + max_tail
    uint32_t *positions; // [max(T, CHUNK_ROWS)] host
    layer_views views;
    struct loss_pass *losses; // loss_pass.h; NULL: not asked for
};

prefix_kv forward_prefix(const forward *f, uint32_t layer);
tail_kv forward_tails(const forward *f, uint32_t layer);

// Calls by which the forward pass informs the loss pass (they do nothing if there is none): a layer's context keys and
// values; the chunk of a call's rows that goes through the layers together, n from `first` on of all `rows`; and a
// layer's queries of that chunk.
typedef struct loss_pass loss_pass;
void loss_pass_begin(loss_pass *l);
void loss_pass_take_context(forward *f, uint32_t layer, const prefix_kv *kv);
void loss_pass_chunk(loss_pass *l, const decode_row *rows, uint32_t first, uint32_t n);
void loss_pass_take_queries(forward *f, uint32_t layer);
void loss_pass_close(forward *f);
