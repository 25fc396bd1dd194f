// The loss that tables minimise if the record has curves and gains (docs/objective.md): how far the heads' outputs
// move, times the effect of such a movement on the model's output. In nats:
//
//     loss(n) = sum over layers l of gain_l * sum over its KV heads h of e_h(n_h)
#pragma once
#include "solver/curve.h"
#include "study/selection.h"

// Tells whether every selected question has the metric's curves, and at least one question has gains.
bool output_loss_is_there(const selection *s, const char *metric);

// Computes gain [L]: the sum of all KL divided by the sum of all squares, over the questions of the selected contexts
// that have gains, for each kind (white noise, the layer's heads cut to 20 % and to 4 %), and then the geometric mean
// over the kinds. Fails with KVB_MISMATCH if a layer has no gain.
kvb_status output_gains_read(double *gain, const selection *s, kvb_error *err);

// Computes loss [L, G, RECORD_PACKINGS]: what formats lose, in nats, as a mean over the selected questions whose errors
// of formats are recorded. Fails with KVB_MISMATCH if none are.
kvb_status output_packings_read(double *loss, const selection *s, const double *gain, kvb_error *err);

// Fills the curves of a question by linear interpolation between the recorded levels. They are in nats, so c->total is
// 1, and need not fall (c->rises). `buffer` [L, G, RECORD_CURVE_LEVELS].
kvb_status output_curves_fill(loss_curves *c, const selection *s, size_t context, uint32_t question, const char *metric,
                              const double *gain, float *buffer, kvb_error *err);
