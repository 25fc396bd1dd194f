// A source of weights: a GGUF file or the parts of one, or a folder as Hugging Face writes it (config.json, one or more
// *.safetensors, with an index if there are several). Numbers are looked up by key, tensors by name;
// weights_unclaimed finds tensors that were not looked up, so that nothing is silently ignored.
// Everything stays mapped; pointers are valid until weights_close. weights_check tells whether the files are unchanged.
#pragma once
#include "profiler/weights/stored_matrix.h"
#include "profiler/weights/tensor_list.h"
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// Numbers: key, name in GGUF after "ARCHITECTURE." (no prefix if it begins with '/'), name in config.json: '@' is
// looked up in rope_parameters (transformers 5), else in rope_scaling (4), else at the top level; '~' in
// rope_parameters of the layers with a window (sliding_attention).
#define WEIGHT_KEYS(X)                                                                            \
    X(LAYERS, "block_count", "num_hidden_layers")                                                 \
    X(HEADS, "attention.head_count", "num_attention_heads")                                       \
    X(KV_HEADS, "attention.head_count_kv", "num_key_value_heads")                                 \
    X(HEAD_DIM, "attention.key_length", "head_dim")                                               \
    X(VALUE_DIM, "attention.value_length", "v_head_dim")                                          \
    X(WIDTH, "embedding_length", "hidden_size")                                                   \
    X(FFN_WIDTH, "feed_forward_length", "intermediate_size")                                      \
    X(CONTEXT, "context_length", "max_position_embeddings")                                       \
    X(NORM_EPS, "attention.layer_norm_rms_epsilon", "rms_norm_eps")                               \
    X(ROPE_BASE, "rope.freq_base", "@rope_theta")                                                 \
    X(ROPE_DIM, "rope.dimension_count", "")                                                       \
    X(ROPE_SHARE, "", "@partial_rotary_factor")                                                   \
    X(ROPE_FACTOR, "rope.scaling.factor", "@factor")                                              \
    X(ROPE_ORIGINAL, "rope.scaling.original_context_length", "@original_max_position_embeddings") \
    X(ROPE_LOW, "", "@low_freq_factor")                                                           \
    X(ROPE_HIGH, "", "@high_freq_factor")                                                         \
    X(ROPE_FAST, "rope.scaling.yarn_beta_fast", "@beta_fast")                                     \
    X(ROPE_SLOW, "rope.scaling.yarn_beta_slow", "@beta_slow")                                     \
    X(ROPE_ATTENTION, "rope.scaling.attn_factor", "@attention_factor")                            \
    X(ROPE_MSCALE, "", "@mscale")                                                                 \
    X(ROPE_MSCALE_ALL, "rope.scaling.yarn_log_multiplier", "@mscale_all_dim")                     \
    X(ROPE_GROWTH, "attention.temperature_scale", "@llama_4_scaling_beta")                        \
    X(ROPE_TRUNCATE, "", "@truncate")                                                             \
    X(WINDOW, "attention.sliding_window", "sliding_window")                                       \
    X(LOCAL_ROPE_BASE, "rope.freq_base_swa", "rope_local_base_freq")                              \
    X(SLIDING_ROPE_BASE, "", "~rope_theta")                                                       \
    X(USE_WINDOW, "", "use_sliding_window")                                                       \
    X(MAX_WINDOW_LAYERS, "", "max_window_layers")                                                 \
    X(WINDOW_PERIOD, "attention.sliding_window_pattern", "sliding_window_pattern")                \
    X(EXPERTS, "expert_count", "num_experts")                                                     \
    X(LOCAL_EXPERTS, "", "num_local_experts")                                                     \
    X(EXPERTS_USED, "expert_used_count", "num_experts_per_tok")                                   \
    X(EXPERT_WIDTH, "expert_feed_forward_length", "moe_intermediate_size")                        \
    X(EXPERT_STEP, "", "decoder_sparse_step")                                                     \
    X(EXPERT_NORM, "", "norm_topk_prob")                                                          \
    X(CLIP_QKV, "attention.clamp_kqv", "clip_qkv")                                                \
    X(QK_LAYER_NORM, "", "use_qk_norm")                                                           \
    X(LAYER_NORM_EPS, "attention.layer_norm_epsilon", "layer_norm_eps")                           \
    X(QUERY_SCALAR, "", "query_pre_attn_scalar")                                                  \
    X(SCORE_CAP, "attn_logit_softcapping", "attn_logit_softcapping")                              \
    X(LOGIT_CAP, "final_logit_softcapping", "final_logit_softcapping")                            \
    X(LOGIT_FACTOR, "logit_scale", "logit_scale")                                                 \
    X(ATTENTION_BIAS, "", "attention_bias")                                                       \
    X(MLP_BIAS, "", "mlp_bias")                                                                   \
    X(VOCABULARY, "", "vocab_size")                                                               \
    X(TIED, "", "tie_word_embeddings")                                                            \
    X(EMBEDDING_SCALE, "embedding_scale", "embedding_multiplier")                                 \
    X(RESIDUAL_SCALE, "residual_scale", "residual_multiplier")                                    \
    X(ATTENTION_SCALE, "attention.scale", "attention_multiplier")                                 \
    X(LOGIT_SCALE, "logit_scale", "logits_scaling")                                               \
    X(BOS, "/tokenizer.ggml.bos_token_id", "bos_token_id")                                        \
    X(EOS, "/tokenizer.ggml.eos_token_id", "eos_token_id")                                        \
    X(EOT, "/tokenizer.ggml.eot_token_id", "eos_token_id")                                        \
    X(ADD_BOS, "/tokenizer.ggml.add_bos_token", "")

// Texts, and lists of numbers or texts.
#define WEIGHT_TEXTS(X)                             \
    X(ROPE_TYPE, "rope.scaling.type", "@rope_type") \
    X(ROPE_OLD_TYPE, "", "@type")                   \
    X(DTYPE, "", "dtype")                           \
    X(OLD_DTYPE, "", "torch_dtype")                 \
    X(NAME, "/general.name", "_name_or_path")       \
    X(ACTIVATION, "", "hidden_act")

#define WEIGHT_LISTS(X)                                               \
    X(LAYER_TYPES, "attention.sliding_window_pattern", "layer_types") \
    X(NO_ROPE_LAYERS, "", "no_rope_layers")                           \
    X(DENSE_LAYERS, "", "mlp_only_layers")                            \
    X(ROPE_SHORT, "", "@short_factor")                                \
    X(ROPE_LONG, "", "@long_factor")

typedef enum weight_key {
#define WEIGHT_ENUM(name, gguf, hf) WEIGHT_##name,
    WEIGHT_KEYS(WEIGHT_ENUM) WEIGHT_TEXTS(WEIGHT_ENUM) WEIGHT_LISTS(WEIGHT_ENUM)
#undef WEIGHT_ENUM
        N_WEIGHT_KEYS
} weight_key;

// A tensor as its file stores it: rows back to back, whole blocks each.
typedef struct weight_tensor {
    char name[128];         // in the file
    const char *file;       // for messages
    uint32_t type;          // a gguf_tensor_type, or a number that none has
    char type_name[16];     // for messages
    uint32_t n_dims;        // in the file; all but the columns are multiplied into rows
    uint64_t rows, columns; // a vector has one row
    const unsigned char *data;
    size_t row_bytes;
} weight_tensor;

// The identity of weights in a form that other programs can check: every file's hash, and where they came from.
typedef struct weights_file {
    char name[256]; // without its folder; what is not printable ASCII is '?'
    char sha256[65];
} weights_file;

typedef struct weights_origin {
    const char *container; // "gguf" or "safetensors"
    char hf_id[200];       // ORGANISATION/NAME, or NAME, at Hugging Face; "": not known
    char hf_revision[65];  // the commit there; "": not known
    weights_file *files;   // [n_files] all that hold weights, in the order in which they are read
    size_t n_files;
} weights_origin;

// An open source, read-only for callers. Types that are only declared here are internal (weights_internal.h).
typedef struct weights {
    char name[512];            // the path, for messages
    char architecture[64];     // GGUF's general.architecture; config.json's model_type
    bool is_gguf;              // else a folder
    bool is_mxfp4;             // the config says that the experts are MXFP4
    weights_origin origin;     // empty before weights_identify
    struct weight_name *names; // [n_names] of all tensors, sorted; 0: a config without weights
    size_t n_names;
    const struct weights_kind *kind;
    void *source;              // the kind's own
    struct weight_file *files; // [n_files] in the order in which they are hashed
    size_t n_files;
} weights;

// Called while weight files are hashed, with the bytes done and in all; return false to stop.
typedef struct weights_watch {
    bool (*hashed)(void *context, double done, double total);
    void *context;
} weights_watch;

// `path`: a GGUF file, any part of a split one, a folder with config.json, or that config.json. Errors name file and
// place: KVB_IO, KVB_FORMAT (damaged, an index that names missing files, parts that are not of one model),
// KVB_UNSUPPORTED. On failure *out is NULL. config_suffices: a folder may lack its weight files.
kvb_status weights_open(weights **out, const char *path, bool config_suffices, kvb_error *err);
// Opens a source without tensors from the bytes of a config.json; `name` stands for the folder in messages.
kvb_status weights_from_config(weights **out, const char *name, const void *config, size_t size, kvb_error *err);
void weights_close(weights *w); // NULL is fine
// Returns the gguf_tensor_type that config.json states for the weights, BF16 if it does not say; for plans.
uint32_t weights_default_type(const weights *w);

const char *weights_key_name(const weights *w, weight_key key, char text[96]); // the key's name in this container

// If the source does not have the key (or it is null), *found is false, *out is unchanged and the status is KVB_OK.
// Booleans are 0 or 1; a list in config.json gives its first number. Fails with KVB_FORMAT for another type.
kvb_status weights_number(const weights *w, weight_key key, double *out, bool *found, kvb_error *err);
// Copies a text to `out`, at most size - 1 bytes and a NUL; empty if the source does not have the key.
kvb_status weights_text(const weights *w, weight_key key, char *out, size_t size, kvb_error *err);
// Reads a list into out[0..*n-1]; *n is 0 if the source does not have the key. Fails with KVB_FORMAT if the list is
// longer than max. A text in it counts as 1 if it begins with "sliding", else as 0, which is what layer_types needs.
kvb_status weights_list(const weights *w, weight_key key, double *out, size_t max, size_t *n, kvb_error *err);

// Finds the tensor of that name ("" means that this container has none of this role) and claims it; returns false if
// there is none.
bool weights_find(weights *w, const char *name, weight_tensor *out);
// Returns the name of a tensor that was not claimed and that a text model needs, or NULL.
const char *weights_unclaimed(const weights *w);

// Computes the SHA-256 of a GGUF file; for a split one, that over its parts' names and hashes; for a folder, that over
// its config and its weight files' names and hashes, in order. `watch` may be NULL; if it stops, KVB_INTERRUPTED.
kvb_status weights_identify(weights *w, const weights_watch *watch, char sha256[65], kvb_error *err);
// Adds model_container, model_files and, if known, hf_id and hf_revision to a record's attributes (formats/README.md).
void origin_describe(const weights_origin *o, cJSON *attributes);
// Fails with KVB_IO if a file was truncated or changed since weights_open.
kvb_status weights_check(const weights *w, kvb_error *err);
// Releases the memory of pages that were read.
void weights_forget(const weights *w);

// For readers of what accompanies the weights, such as the tokenizer: the GGUF file with the metadata (NULL for a
// folder), and the folder's path (NULL for a GGUF file).
const struct gguf_file *weights_gguf_file(const weights *w);
const char *weights_folder_path(const weights *w);
