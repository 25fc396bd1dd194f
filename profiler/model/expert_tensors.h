// The tensors of a layer's experts, as the containers keep them (expert_layout of family.h).
#pragma once
#include "profiler/model/family.h"
#include "profiler/model/model.h"

// For model_memory.c and model_tensors.c, which have the rest. Errors name file and tensor: KVB_FORMAT,
// KVB_UNSUPPORTED, KVB_MEMORY.
kvb_status experts_claim(model *m, weights *w, uint32_t layer, kvb_error *err);
kvb_status experts_load(model_layer *to, const model *m, weights *w, uint32_t layer, kvb_error *err);
void experts_free(model_layer *l, const model *m);
