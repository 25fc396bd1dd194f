// Loading of all tensors of a model (model.c opens it).
#pragma once
#include "profiler/model/family.h"
#include "profiler/model/model.h"

// Looks up every tensor that the model needs and checks its shape and type, then whether the source has any that the
// forward pass would leave out: those are refused, not ignored. Loads nothing; m->rooms says how much memory it would
// take. If the source has no tensors, only m->rooms is filled. Messages name file and tensor.
kvb_status model_claim_tensors(model *m, weights *w, kvb_error *err);

// Loads the tensors onto m->device, for the layers that m->config counts.
kvb_status model_load_tensors(model *m, kvb_error *err);

// Frees what was loaded.
void model_free_tensors(model *m);
