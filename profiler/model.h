// The map: how big everything is. Every shape that the forward pass relies on stands here, checked when the model is loaded.
#pragma once
#include "profiler/backend.h"
#include "profiler/gguf.h"
#include "profiler/tokenizer.h"

// Heads up to this size; backends keep one head's row on the stack.
enum { MODEL_MAX_HEAD_DIM = 512 };

typedef struct model_config {
    char architecture[32];
    char name[128];          // general.name, or the file's name
    uint32_t n_layers;       // L
    uint32_t n_heads;        // H query heads
    uint32_t n_kv_heads;     // G, divides H
    uint32_t head_dim;       // d
    uint32_t width;          // D, of the residual stream
    uint32_t ffn_width;      // F
    uint32_t vocabulary;     // rows of the embedding
    uint32_t context_length; // positions the model was trained for
    uint32_t rope_dim;       // dimensions of a head that rotate; equals head_dim in this architecture
    float rope_base;         // theta
    float rope_scale;        // linear position scaling, 1 = none
    float norm_eps;
} model_config;

typedef struct model_layer {
    dev attn_norm, ffn_norm; // [D]
    dev_matrix wq;           // [H*d, D]
    dev_matrix wk, wv;       // [G*d, D]
    dev_matrix wo;           // [D, H*d]
    dev_matrix gate, up;     // [F, D]
    dev_matrix down;         // [D, F]
    dev value_root;          // [H, d, d]: root_h^T root_h = W_O^(h) W_O^(h)T, so ||v W_O^(h)|| = ||root_h v||
} model_layer;

typedef struct model {
    model_config config;
    const backend *device;
    dev_matrix embedding; // [vocabulary, D]
    dev_matrix head;      // [vocabulary, D]; the embedding itself when tied
    bool head_is_tied;
    dev final_norm;        // [D]
    model_layer *layers;   // L
    float *rope_frequency; // host [rope_dim/2]: radians per position, scaling and rope_freqs.weight applied
    tokenizer *tokens;
    char sha256[65];                     // of the whole model file
    struct query_statistics *statistics; // for metrics that use stored ones; NULL: none
} model;

// Loads a GGUF model onto `device`: reads the config, checks every tensor's presence and shape before any arithmetic, dequantises to
// float32, undoes GGUF's row permutation of Q and K (so that RoPE pairs are (i, i + rope_dim/2), as in transformers), and prepares
// value_root. Tensors that the forward pass would ignore (biases, experts, norms of other architectures) are refused.
// On failure *out is NULL. model_free(NULL) is fine.
kvb_status model_open(model **out, const char *path, const backend *device, kvb_error *err);
// The same with the first n_layers layers only (0: all), for studies of time and memory: what comes out is no language model.
// KVB_ARGUMENT when the file has fewer.
kvb_status model_open_layers(model **out, const char *path, const backend *device, uint32_t n_layers, kvb_error *err);
// Replaces the tokenizer by one with another pre-tokenizer than the file names; `path` is the file that was opened.
kvb_status model_set_pre_tokenizer(model *m, const char *path, const char *pre, kvb_error *err);
// Gives metrics stored query statistics (query_statistics.h) from a file; they belong to the model.
kvb_status model_set_statistics(model *m, const char *path, kvb_error *err);
void model_free(model *m);

// Reads the config alone, with all its checks.
kvb_status model_read_config(model_config *out, const gguf_file *f, kvb_error *err);
