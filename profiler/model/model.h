// A loaded model: its configuration (model_config.h) and its weights on a device. For text see model_text.h.
#pragma once
#include "profiler/model/model_config.h"
#include "profiler/weights/tensor_list.h"

// Fields and shapes are those of tensor_list.h; {NULL} if the family has no such tensor.
typedef struct model_layer {
#define MATRIX_FIELD(role, field, ...) dev_matrix field;
#define VECTOR_FIELD(role, field, ...) dev field;
    LAYER_MATRICES(MATRIX_FIELD)
    LAYER_VECTORS(VECTOR_FIELD)
#undef MATRIX_FIELD
#undef VECTOR_FIELD
    dev_matrix *experts; // [E, 3] gate, up [F, D] and down [D, F] of each expert, in layers that have experts; else
                         // NULL
    dev expert_bias;     // [E, 2 F + D] of the same; {NULL}: none
    dev value_root;      // [H, d, d]: root_h^T root_h = W_O^(h) W_O^(h)T, so ||v W_O^(h)|| = ||root_h v||
} model_layer;

// Bytes of a group of weights: those of the embedding and the output matrix are group 0, layer l's group l + 1.
typedef struct weight_room {
    uint64_t held, in_place; // memory needed if they are held, and if they are read from the file
    uint64_t file;           // bytes of the file read per pass in the second case
} weight_room;

typedef struct weights_watch weights_watch;

// Options of model_open; all zero means the defaults.
typedef struct model_options {
    uint32_t n_layers; // load only the first ones, for studies of time and memory (the outputs make no sense). 0: all;
                       // KVB_ARGUMENT if the file has fewer
    bool without_weights;       // nothing is hashed or loaded: for model_identify and model_load, or for a plan
    bool for_plan;              // in addition: a folder may lack its weight files, or be just a config.json
    const weights_watch *watch; // called while the files are hashed; NULL: none
} model_options;

typedef struct model {
    model_config config;
    backend_device *device; // holds the weights; a pass opens its own from device->b
    dev_matrix embedding;   // [vocabulary, D]
    dev_matrix head;        // [vocabulary, D]; the embedding itself when tied
    bool head_is_tied;
    dev final_norm;         // [D]
    model_layer *layers;    // L
    char sha256[65];        // of the whole model file, or of all weight files (weights_identify); "" before that
    struct weights *source; // stays open: rows and weights are read from the mapped files
    const struct family *family;
    weight_room *rooms;  // [1 + L]
    uint32_t n_held;     // the first n_held groups are held in memory; the others are read in place
    uint32_t most_terms; // the widest row of any matrix
    bool has_made;       // a matrix is held as BF16 or as whole numbers
} model;

// Loads a model from a GGUF file or a folder of Hugging Face (weights.h) onto a device of that backend: reads the
// config, checks every tensor's presence and shape before any arithmetic, undoes row permutations of Q and K (so that
// RoPE pairs are (i, i + rope_dim/2), as in transformers), and prepares value_root. Tensors that the forward pass would
// ignore are refused. Fails with KVB_IO if a file changes or is truncated while it is read. Files stay mapped as long
// as the model is open: model_check tells whether they are unchanged. `options` may be NULL. On failure *out is NULL.
// model_free(NULL) is allowed.
kvb_status model_open(model **out, const char *path, const backend *b, const model_options *options, kvb_error *err);
// Hashes the files of a model that was opened without_weights, for its sha256 and its source's origin; `watch` as
// above.
kvb_status model_identify(model *m, const weights_watch *watch, kvb_error *err);
// Loads the weights of a model that was opened without_weights: the first n_held groups (model.n_held) into memory;
// products read the others from the file, which gives the same bits but is slower.
kvb_status model_load(model *m, uint32_t n_held, kvb_error *err);
// Fails with KVB_IO if the files were truncated or changed since model_open.
kvb_status model_check(const model *m, kvb_error *err);
void model_free(model *m);

// With n_held groups in memory: bytes of memory that the weights take, and bytes of the file read per pass.
uint64_t model_weight_bytes(const model *m, uint32_t n_held);
uint64_t model_mapped_bytes(const model *m, uint32_t n_held);
// The most groups that fit into `bytes` of memory; always all on backends that cannot read in place.
uint32_t model_fit_weights(const model *m, uint64_t bytes);
// backend_limits.made_terms of this model.
uint32_t model_made_terms(const model *m);
// Rows of a context in one call of projections and feed-forward: the backend's context_rows, or as many as possible if
// each call converts weights again, or if the rows are divided among experts, which then get few each.
uint32_t model_context_rows(const model *m);
// How a layer attends.
attention_shape model_attention(const model *m, uint32_t layer);
