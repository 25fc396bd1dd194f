// What the two kinds of sources share.
#pragma once
#include "formats/file_read.h"
#include "formats/sha256.h"
#include "profiler/weights/weights.h"

typedef struct weight_name {
    char *name;
    size_t file; // which of the source's files has it
    bool claimed;
} weight_name;

// Hashing all files of a source; done and all in bytes.
typedef struct weights_hashing {
    weights_origin *origin;
    sha256_state *all; // over all names and hashes
    const weights_watch *watch;
    uint64_t done, total;
} weights_hashing;

typedef struct weights_kind {
    void (*close)(weights *w);
    kvb_status (*number)(const weights *w, weight_key key, double *out, bool *found, kvb_error *err);
    kvb_status (*text)(const weights *w, weight_key key, char *out, size_t size, kvb_error *err);
    kvb_status (*list)(const weights *w, weight_key key, double *out, size_t max, size_t *n, kvb_error *err);
    bool (*tensor)(const weights *w, const weight_name *name, weight_tensor *out);
    bool (*may_be_left)(const char *name); // by a text model
    kvb_status (*identify)(const weights *w, struct weights_hashing *h, char sha256[65], kvb_error *err);
    kvb_status (*check)(const weights *w, kvb_error *err);
    void (*forget)(const weights *w);
} weights_kind;

struct weights {
    char name[512];
    char architecture[64];
    const weights_kind *kind;
    void *source;       // the kind's own
    bool is_fp8;        // says the config: of its layers
    bool is_mxfp4;      // of its experts
    uint32_t block[2];  // rows and columns that share a scale; 0: the scales' shape says it
    weight_name *names; // of all tensors, sorted
    size_t n_names, max_names;
    weights_origin origin;
};

extern const weights_kind weights_gguf, weights_folder;
extern const char *const weight_names[N_WEIGHT_KEYS][2]; // GGUF, Hugging Face

kvb_status weights_open_gguf(weights *w, const char *path, kvb_error *err);
// config_suffices: weight files may be missing.
kvb_status weights_open_folder(weights *w, const char *folder, bool config_suffices, kvb_error *err);
kvb_status weights_parse_config(weights *w, const char *name, const void *config, size_t size, kvb_error *err);
// quantization_config of the object `config`, where it has one, into is_fp8, is_mxfp4 and block; `folder` is for
// messages. KVB_UNSUPPORTED for a method that cannot be read, KVB_FORMAT for blocks that are no sizes.
kvb_status weights_read_quantisation(weights *w, const struct cJSON *config, const char *folder, kvb_error *err);
void weights_add_name(weights *w, const char *name, size_t file);
kvb_status weights_sort_names(weights *w, kvb_error *err);
// Hashes a file of weights: it stands in h->origin then, its name and hash are in h->all, and the memory of its pages
// is given back. `name` is without its folder.
kvb_status weights_hash_file(weights_hashing *h, const char *name, const file_view *map, kvb_error *err);
