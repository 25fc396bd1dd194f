// A model that is loaded: its numbers (model_config.h) and its weights on a device. Texts are model_text.h's.
#pragma once
#include "profiler/model/model_config.h"
#include "profiler/weights/tensor_list.h"

// Fields and shapes as tensor_list.h has them; {NULL} where the family has no such tensor.
typedef struct model_layer {
#define MATRIX_FIELD(role, field, ...) dev_matrix field;
#define VECTOR_FIELD(role, field, ...) dev field;
    LAYER_MATRICES(MATRIX_FIELD)
    LAYER_VECTORS(VECTOR_FIELD)
#undef MATRIX_FIELD
#undef VECTOR_FIELD
    dev_matrix *experts; // [E, 3] gate, up [F, D] and down [D, F] of each, in layers that have them; else NULL
    dev expert_bias;     // [E, 2 F + D] of the same; {NULL}: none
    dev value_root;      // [H, d, d]: root_h^T root_h = W_O^(h) W_O^(h)T, so ||v W_O^(h)|| = ||root_h v||
} model_layer;

// How weights stand in memory. In all of them the numbers that come out are the same, but for WEIGHTS_HALF where the
// file has more bits.
typedef enum weight_form {
    WEIGHTS_KEEP, // as few bits as the file has, where the products of this machine can take them so
    WEIGHTS_WIDE, // as products take them: float32, or bfloat16 where those are computed in it
    WEIGHTS_HALF  // rounded to bfloat16
} weight_form;

// Bytes of a group of weights: those of the embedding and the output matrix are group 0, layer l's group l + 1.
typedef struct weight_room {
    uint64_t held, in_place; // of memory, when they are held there, and when they are read from the file
    uint64_t file;           // that are read for each pass then
} weight_room;

typedef struct weights_watch weights_watch;

// What may be wished of model_open; zero: nothing.
typedef struct model_options {
    uint32_t n_layers; // the first ones only, for studies of time and memory: what comes out is no language model.
                       // 0: all; KVB_ARGUMENT when the file has fewer
    weight_form form;
    bool without_weights;       // nothing is hashed or loaded: for model_identify and model_load, or for a plan
    bool for_plan;              // as well: a folder may lack its weight files, or be a config.json alone
    const weights_watch *watch; // told while the files are hashed; NULL: nobody
} model_options;

typedef struct model {
    model_config config;
    backend_device *device; // holds the weights; a pass opens one of its own from device->b
    dev_matrix embedding;   // [vocabulary, D]
    dev_matrix head;        // [vocabulary, D]; the embedding itself when tied
    bool head_is_tied;
    dev final_norm;         // [D]
    model_layer *layers;    // L
    char sha256[65];        // of the whole model file, or of all weight files (weights_identify); "" before that
    struct weights *source; // stays open: rows and weights are read from it where they stand
    const struct family *family;
    weight_form form;
    weight_room *rooms;  // [1 + L]
    uint32_t n_held;     // groups that are held in memory, the first ones; the others are read in place
    uint32_t most_terms; // the widest row of any matrix
    bool has_halves;     // a matrix is of BF16, and held so
} model;

// Loads a model from a GGUF file or a folder of Hugging Face (weights.h) onto a device of that backend: reads the
// config, checks every tensor's presence and shape before any arithmetic, undoes row permutations of Q and K (so that
// RoPE pairs are (i, i + rope_dim/2), as in transformers), and prepares value_root. Tensors that the forward pass would
// ignore are refused. A file that changes or is cut short while it is read is KVB_IO. It stays mapped as long as the
// model: model_check says whether it is still the same. `options` NULL: none. On failure *out is NULL. model_free(NULL)
// is fine.
kvb_status model_open(model **out, const char *path, const backend *b, const model_options *options, kvb_error *err);
// Hashes the files of a model that was opened without_weights, for its sha256 and its source's origin; `watch` as
// above.
kvb_status model_identify(model *m, const weights_watch *watch, kvb_error *err);
// Loads the weights of a model that was opened without_weights, those of the first n_held groups (model.n_held) into
// memory; products read the others from the file, which gives the same bits and takes longer.
kvb_status model_load(model *m, uint32_t n_held, kvb_error *err);
// Were the files whole and the same since model_open? KVB_IO otherwise.
kvb_status model_check(const model *m, kvb_error *err);
void model_free(model *m);

// Bytes of memory that the weights take with n_held groups in memory, and of the file that are read for each pass then.
uint64_t model_weight_bytes(const model *m, uint32_t n_held);
uint64_t model_mapped_bytes(const model *m, uint32_t n_held);
// The most groups that `bytes` of memory hold; all of them on backends that read nothing in place.
uint32_t model_fit_weights(const model *m, uint64_t bytes);
// backend_limits.made_terms of this model.
uint32_t model_made_terms(const model *m);
// Rows of a context that go through projections and feed-forward at a time: the backend's own number, or as many as
// possible where each such step makes weights anew, or where experts share the rows out: each gets few.
uint32_t model_context_rows(const model *m);
// How a layer attends.
attention_shape model_attention(const model *m, uint32_t layer);
