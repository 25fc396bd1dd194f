// The numbers of a model: how big everything is and what its layers do. Read from a source of weights and checked by
// family.c; every shape that the forward pass relies on stands here.
#pragma once
#include "profiler/model/rope.h"

enum { MODEL_MAX_LAYERS = 4096 };

// What a family's layers have beside the plain block of Llama.
typedef enum family_switch {
    QKV_BIAS = 1,         // biases of queries, keys and values
    O_BIAS = 2,           // bias of the output projection
    MLP_BIAS = 4,         // biases of gate, up and down
    QK_NORM = 8,          // queries and keys are normed head by head, before RoPE
    QK_ROW_NORM = 16,     // queries and keys are normed over all heads together, before RoPE
    POST_NORMS = 32,      // what attention and feed-forward add is normed first
    NO_PRE_NORMS = 64,    // what goes into them is not
    FUSED_QKV = 128,      // one matrix of queries, keys and values
    FUSED_GATE_UP = 256,  // one matrix of gate and up
    EXPERTS = 512,        // layers of model_config.sparse have experts in the place of a feed-forward
    EXPERT_BIAS = 1024,   // biases of router and experts
    SINKS = 2048,         // attention_shape.sinks
    LAYER_NORM = 4096,    // norms take the mean away
    PARALLEL = 8192,      // attention and feed-forward read the same normed row
    QK_HEAD_NORM = 16384, // queries and keys lose their mean and are normed head by head, each with its own weights
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
    float query_scale; // queries times this, after RoPE, so that q . k / sqrt(d) is the model's attention logit; 1
    float qkv_clip;    // queries, keys and values stay within this of 0, before RoPE; 0: they are as they are
    float score_cap;   // attention_shape.softcap; 0: none
    float logit_cap;   // logits become cap * tanh(logit / cap); 0: they stay
    float local_theta; // RoPE's base in bounded layers, without scaling; 0: theirs is that of all
    uint32_t n_experts, n_used, expert_width; // E, how many of them a row goes through, and theirs F; 0: none
    bool experts_normed;                      // the weights of those that are used sum to one
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

// Layers below `end` whose cache grows with the context. Oracle, scores and budgets are theirs alone, and arrays [B, G,
// T] hold them one after the other: layer l's place is model_budgeted(c, l), their number model_budgeted(c, L).
uint32_t model_budgeted(const model_config *c, uint32_t end);

// What `entries` cached tokens of n_tokens, over all heads of all layers, are of those of the layers that are budgeted;
// bounded layers hold n_tokens in every head.
double model_kept_share(const model_config *c, uint64_t entries, uint32_t n_tokens);

struct family;
struct weights;

// Reads and checks all numbers; *out is its family. The embedding's rows are the vocabulary. Claims no tensor but those
// of rotary factors.
kvb_status model_read_config(model_config *c, const struct family **out, struct weights *w, kvb_error *err);
