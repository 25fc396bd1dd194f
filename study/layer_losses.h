// Which layers of a model matter: their gains, and the loss predicted for each of them (output_loss.h).
#pragma once
#include "study/pairs.h"

typedef struct layer_losses {
    uint32_t n_layers; // that are budgeted
    double *layer;     // [n_layers] their numbers in the model
    double *gain;      // [n_layers] nats per squared movement
    double *loss;      // [n_layers] nats, means over the questions
} layer_losses;

// Computes them from the record at `path` for the share `ratio` of every head pruned. Errors: those of selection_open()
// and pairs_open(); KVB_MISMATCH if the record has no curves and gains. The caller frees, also after a failure.
kvb_status layer_losses_read(layer_losses *out, const char *path, const char *metric, double ratio, kvb_error *err);
void layer_losses_free(layer_losses *l); // a zero struct is allowed; leaves it zero
