// What weights.c, weights_gguf.c and weights_hf.c share: a source of weights, and its kind.
#pragma once
#include "formats/file_read.h"
#include "profiler/weights/weights.h"

typedef struct weight_name {
    char *name;
    size_t file; // which of the source's files has it
    bool claimed;
} weight_name;

// A file that holds weights.
typedef struct weight_file {
    const char *path; // for messages; the part after its last '/' is the name that is hashed
    const file_view *map;
} weight_file;

typedef struct weights_kind {
    void (*close)(weights *w);
    kvb_status (*number)(const weights *w, weight_key key, double *out, bool *found, kvb_error *err);
    kvb_status (*text)(const weights *w, weight_key key, char *out, size_t size, kvb_error *err);
    kvb_status (*list)(const weights *w, weight_key key, double *out, size_t max, size_t *n, kvb_error *err);
    bool (*tensor)(const weights *w, const weight_name *name, weight_tensor *out);
    bool (*may_be_left)(const char *name); // whether a text model may ignore the tensor; NULL: it may ignore none
    // Fills the origin except its files. Returns the text that is hashed before these, to be freed with cJSON_free, or
    // NULL if there is none.
    char *(*describe)(const weights *w, weights_origin *origin);
} weights_kind;

extern const char *const weight_names[N_WEIGHT_KEYS][2]; // GGUF, Hugging Face

kvb_status weights_open_gguf(weights *w, const char *path, kvb_error *err);
// config_suffices: weight files may be missing.
kvb_status weights_open_folder(weights *w, const char *folder, bool config_suffices, kvb_error *err);
void weights_add_name(weights *w, const char *name, size_t file);
kvb_status weights_sort_names(weights *w, kvb_error *err);
// Adds a file of the source; the mapping must last until the source is closed.
void weights_add_file(weights *w, const char *path, const file_view *map);

// The parts of a hub cache's path, .../models--ORGANISATION--NAME/snapshots/COMMIT: fills id and revision and returns
// true, or leaves both as they are. `folder` is absolute.
bool origin_from_path(char id[200], char revision[65], const char *folder);
// Whether a text is a repository's name, such as "org/name": two plain names with one '/' between them.
bool origin_is_id(const char *text);
// The name in https://huggingface.co/ORGANISATION/NAME[/...]; false for any other address.
bool origin_from_url(char id[200], const char *url);

// Sets id and revision from the folder that holds the weights: a hub cache's path, or a folder that was downloaded on
// its own (.cache/huggingface/download/FILE.metadata, whose first line is the commit). What is not known is left alone.
void origin_of_folder(weights_origin *o, const char *folder, const char *file);
// Appends a file to o->files by the last part of `path`; characters that are not printable ASCII become '?'.
void origin_add_file(weights_origin *o, const char *path, const char sha256[65]);
void origin_free(weights_origin *o); // leaves it zero

// model.safetensors.index.json of a folder: which file holds which tensor.
typedef struct weights_index {
    cJSON *all;         // owns all texts
    const cJSON *map;   // of each tensor's name to the name of its file
    const char **files; // [n_files] each once, in the order of the map
    size_t n_files;
} weights_index;

// Parses the index; `name` is the file, for messages. Fails with KVB_FORMAT: not a JSON object, no object weight_map, a
// tensor that is listed twice, a file that is not a plain name in the folder. On failure *out is zero.
kvb_status weights_index_parse(weights_index *out, const void *data, size_t size, const char *name, kvb_error *err);
void weights_index_free(weights_index *x); // leaves it zero
