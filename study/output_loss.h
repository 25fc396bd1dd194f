// The loss that tables are solved for where a record has what it takes (docs/objective.md): how far heads' outputs
// move, times what such a movement does to the model's output. In nats:
//
//     loss(n) = sum over layers l of gain_l * sum over its KV heads h of e_h(n_h)
#pragma once
#include "solver/curve.h"
#include "study/selection.h"

// Whether every selected question has the metric's curves, and any has gains.
bool output_loss_is_there(const selection *s, const char *metric);

// gain [L]: the geometric mean, over the kinds (white noise, the layer's heads cut to 20 % and to 4 %), of all KL over
// all squares, of the questions of the selected contexts that have gains.
// KVB_MISMATCH where a layer has none.
kvb_status output_gains_read(double *gain, const selection *s, kvb_error *err);

// Fills the curves of the question, in nats, so c->total is 1: straight lines between the recorded levels, which need
// not fall (c->rises). `buffer` [L, G, RECORD_CURVE_LEVELS].
kvb_status output_curves_fill(loss_curves *c, const selection *s, size_t context, uint32_t question, const char *metric,
                              const double *gain, float *buffer, kvb_error *err);
