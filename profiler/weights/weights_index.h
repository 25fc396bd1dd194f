// model.safetensors.index.json of a folder: which file holds which tensor.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stddef.h>

typedef struct weights_index {
    cJSON *all;         // owns all texts
    const cJSON *map;   // its members are tensors, their texts files
    const char **files; // [n_files] each once, in the order of the map
    size_t n_files;
} weights_index;

// `name` is the file, for messages. KVB_FORMAT: not a JSON object, no object weight_map, a tensor that stands twice, a
// file that is not a plain name in the folder. On failure *out is zero.
kvb_status weights_index_parse(weights_index *out, const void *data, size_t size, const char *name, kvb_error *err);
// The same of the file at `path`; KVB_IO.
kvb_status weights_index_read(weights_index *out, const char *path, kvb_error *err);
void weights_index_free(weights_index *x); // leaves it zero
