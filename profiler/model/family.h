// Families of models: each is a row of switches (family.c), plus a short function, `read`, for the rest.
#pragma once
#include "profiler/model/model_config.h"
#include "profiler/weights/weights.h"

enum { FAMILY_NAMES = 6 };

// How a container keeps the matrices of experts.
typedef enum expert_layout {
    EXPERTS_EACH,       // a tensor for each matrix of each expert
    EXPERTS_STACKED,    // gate, up, down of all experts, one after the other: GGUF
    EXPERTS_TRANSPOSED, // gpt-oss: gate and up in turn, [E, D, 2 F], down [E, F, D]; or rows in blocks of MXFP4
} expert_layout;

struct config_reader;

typedef struct family {
    const char *gguf;       // general.architecture; NULL: not from GGUF
    const char *model_type; // of config.json
    unsigned switches;      // family_switch, or-ed
    activation act;         // of the feed-forward
    bool gguf_pairs;        // GGUF stores rows of Q and K as pairs (2i, 2i+1); here, as in transformers, (i, i + d/2)
    bool hf_pairs;          // transformers itself rotates pairs (2i, 2i+1): rows of Q and K are permuted for them too
    bool hf_norm_adds_one;  // transformers' norms multiply with 1 + w; GGUF has the 1 in w
    expert_layout experts;  // of folders
    const char *expert_names[4]; // EXPERTS_EACH, after "model.layers.N.": [3].E.[0], gate; [1], up; [2], down
    bool experts_normed;         // default if the source does not say: weights of the used experts sum to one
    bool rotates_in_windows;     // if some layers have windows, the layers without one have no rotary positions
    bool has_window;             // a sliding window is supported; for other families one is refused
    bool ties;                   // default if config.json does not say: the embedding is the output matrix
    unsigned window_period;      // if no list of window layers is given: every window_period-th layer has none; 0: all
                                 // have one
    struct {
        tensor_role role;
        const char *gguf, *hf;
    } names[FAMILY_NAMES]; // tensors whose names differ from tensor_list.h; NULL: the name there
    // Called after everything else was read; NULL: nothing more to do.
    void (*read)(struct config_reader *r);
} family;

// Finds the family of a source of weights. Fails with KVB_UNSUPPORTED, listing the known ones, if it is unknown.
kvb_status family_find(const family **out, const weights *w, kvb_error *err);

// Writes a layer's tensor name in this container to `out`.
void family_tensor_name(const family *f, tensor_role role, bool gguf, uint32_t layer, char out[128]);
