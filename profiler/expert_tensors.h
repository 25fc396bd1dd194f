// The tensors of a layer's experts, as the containers keep them (expert_layout of family.h).
#pragma once
#include "profiler/family.h"
#include "profiler/model.h"

// For model_tensors.c, which has the rest. Errors name file and tensor: KVB_FORMAT, KVB_UNSUPPORTED, KVB_MEMORY.
kvb_status experts_claim(const model_config *c, const family *f, weights *w, uint32_t layer, kvb_error *err);
kvb_status experts_load(model_layer *to, const model *m, const family *f, weights *w, uint32_t layer, kvb_error *err);
void experts_free(model_layer *l, const model *m);

// model_tensors.c: the tensor of that name, of this shape and of a type that can be read.
kvb_status tensor_find(weight_tensor *out, weights *w, const char *name, uint64_t rows, uint64_t columns,
                       kvb_error *err);
kvb_status tensor_check_shape(const weight_tensor *t, uint64_t rows, uint64_t columns, kvb_error *err);
