// Loading of all tensors of a model (model.c opens it).
#pragma once
#include "profiler/family.h"
#include "profiler/model.h"

// Looks up every tensor that the model needs and checks its shape and type, then whether the source has any that the
// forward pass would leave out: those are refused, not ignored. Nothing is loaded. Messages name file and tensor.
kvb_status model_claim_tensors(const model_config *c, const family *f, weights *w, kvb_error *err);

// Loads them onto m->device, for the layers that m->config counts.
kvb_status model_load_tensors(model *m, const family *f, weights *w, kvb_error *err);

// Frees what was loaded.
void model_free_tensors(model *m);
