// The tensors of a model with its own sizes: what tensor_list.h says, filled in for one config and one container.
#pragma once
#include "profiler/model/family.h"
#include "profiler/model/model.h"

#define COUNT_TENSOR(...) +1
enum { N_MATRICES = 0 LAYER_MATRICES(COUNT_TENSOR), N_VECTORS = 0 LAYER_VECTORS(COUNT_TENSOR) };
#undef COUNT_TENSOR

typedef struct tensor_entry {
    tensor_role role;
    size_t field; // offset in struct model_layer
    uint32_t rows, columns;
    bool there;
    tensor_role fused; // whose rows these are from `first` on; `role` itself where it has a tensor of its own
    uint32_t first, fused_rows;
} tensor_entry;

void entries_matrices(tensor_entry out[N_MATRICES], const model_config *c);
void entries_vectors(tensor_entry out[N_VECTORS], const model_config *c);
// Has this layer that tensor? Layers with experts have a router in the place of a feed-forward.
bool entry_in_layer(const tensor_entry *e, const model_config *c, uint32_t layer);

// Lookups. Errors name file and tensor: KVB_FORMAT (missing, another shape), KVB_UNSUPPORTED (a type that cannot be
// read).
kvb_status entry_find(weight_tensor *out, weights *w, const family *f, const tensor_entry *e, uint32_t layer,
                      kvb_error *err);
kvb_status tensor_find(weight_tensor *out, weights *w, const char *name, uint64_t rows, uint64_t columns,
                       kvb_error *err);
// For tensors that may not be FP8.
kvb_status tensor_check_shape(const weight_tensor *t, uint64_t rows, uint64_t columns, kvb_error *err);
// The output matrix; *tied where the embedding is used in its place, and of a config without weights where that would
// be so.
kvb_status tensor_find_head(weight_tensor *out, bool *tied, const model_config *c, const family *f, weights *w,
                            kvb_error *err);
// Rows first .. first+rows-1 of a tensor that was found.
stored_matrix tensor_rows(const weight_tensor *t, uint32_t first, uint32_t rows);
const char *tensor_norm_name(const weights *w);
const char *tensor_embedding_name(const weights *w);
