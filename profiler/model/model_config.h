// A model's configuration: its sizes and what its layers do. family.c reads it from a source of weights and checks it;
// every shape that the forward pass relies on is here.
#pragma once
#include "profiler/model/rope.h"

enum { MODEL_MAX_LAYERS = 4096 };

// How a family's layers differ from Llama's.
typedef enum family_switch {
    QKV_BIAS = 1,         // biases of queries, keys and values
    O_BIAS = 2,           // bias of the output projection
    MLP_BIAS = 4,         // biases of gate, up and down
    QK_NORM = 8,          // queries and keys are normed head by head, before RoPE
    QK_ROW_NORM = 16,     // queries and keys are normed over all heads together, before RoPE
    POST_NORMS = 32,      // outputs of attention and feed-forward are normed before they are added
    NO_PRE_NORMS = 64,    // their inputs are not normed
    FUSED_QKV = 128,      // one matrix of queries, keys and values
    FUSED_GATE_UP = 256,  // one matrix of gate and up
    EXPERTS = 512,        // layers of model_config.sparse have experts in the place of a feed-forward
    EXPERT_BIAS = 1024,   // biases of router and experts
    SINKS = 2048,         // attention_shape.sinks
    LAYER_NORM = 4096,    // norms subtract the mean
    PARALLEL = 8192,      // attention and feed-forward read the same normed row
    QK_HEAD_NORM = 16384, // queries and keys are layer-normed head by head, each head with its own weights
} family_switch;

typedef struct layer_set {
    uint64_t bits[MODEL_MAX_LAYERS / 64];
} layer_set;

static inline bool layer_set_has(const layer_set *s, uint32_t layer)
{
    return s->bits[layer / 64] >> layer % 64 & 1;
}

static inline void layer_set_add(layer_set *s, uint32_t layer)
{
    s->bits[layer / 64] |= 1ull << layer % 64;
}

typedef struct model_config {
    char architecture[32];
    char name[128];          // general.name, the repository's name, or the file's or folder's
    uint32_t n_layers;       // L
    uint32_t n_heads;        // H query heads
    uint32_t n_kv_heads;     // G, divides H
    uint32_t head_dim;       // d
    uint32_t width;          // D, of the residual stream
    uint32_t ffn_width;      // F
    uint32_t vocabulary;     // rows of the embedding
    uint32_t context_length; // positions the model was trained for
    uint32_t rope_dim;       // dimensions of a head that rotate, the first ones
    float norm_eps;
    unsigned switches; // family_switch
    activation act;
    rope_rule rope;
    float embedding_scale, residual_scale, logit_scale; // of embeddings, of what is added to the stream, of logits; 1
    float query_scale; // queries are multiplied by this after RoPE, so that q . k / sqrt(d) is the model's attention
                       // logit; 1
    float qkv_clip;    // queries, keys and values are clipped to +-qkv_clip, before RoPE; 0: not clipped
    float score_cap;   // attention_shape.softcap; 0: none
    float logit_cap;   // logits become cap * tanh(logit / cap); 0: unchanged
    float local_theta; // RoPE's base in bounded layers, without scaling; 0: the same as in the others
    uint32_t n_experts, n_used, expert_width; // E, experts used per row, and their F; 0: no experts
    bool experts_normed;                      // the weights of the used experts sum to one
    layer_set sparse;                         // layers with experts
    uint32_t window;                          // attention_shape.window of the layers that are bounded
    layer_set unrotated;                      // layers without rotary positions
    layer_set bounded; // layers with a window: their cache does not grow, so there is nothing to budget
} model_config;

static inline bool model_layer_rotates(const model_config *c, uint32_t layer)
{
    return !layer_set_has(&c->unrotated, layer);
}

static inline bool model_layer_bounded(const model_config *c, uint32_t layer)
{
    return layer_set_has(&c->bounded, layer);
}

// Counts the layers below `end` whose cache grows with the context. Only these have importance, scores and budgets, and
// arrays [B, G, T] hold them one after the other: layer l has index model_budgeted(c, l), and B = model_budgeted(c, L).
uint32_t model_budgeted(const model_config *c, uint32_t end);

// The share kept in the budgeted layers, if all layers together hold `entries` cached tokens and bounded layers hold
// n_tokens in every head.
double model_kept_share(const model_config *c, uint64_t entries, uint32_t n_tokens);

struct family;
struct weights;

// Reads and checks the configuration; *out receives the family. The vocabulary is the number of the embedding's rows.
// Claims no tensors except rotary factors.
kvb_status model_read_config(model_config *c, const struct family **out, struct weights *w, kvb_error *err);
