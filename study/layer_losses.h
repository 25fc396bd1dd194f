// Which layers of a model matter: their gains, and what each of them is predicted to lose (output_loss.h).
#pragma once
#include "study/pairs.h"

typedef struct layer_losses {
    uint32_t n_layers; // that are budgeted
    double *layer;     // [n_layers] which of the model's layers each is
    double *gain;      // [n_layers] nats per squared movement
    double *loss;      // [n, n_layers] nats, means over the questions
} layer_losses;

// pruned [n, L, G]: shares of their tokens that the heads of all of the model's layers lose; NULL: the n ratios that
// `even` [n] has, the same in all heads, of the record at `path`. Errors: those of selection_open() and pairs_open();
// KVB_MISMATCH where the record has no curves and gains. The caller frees, also after a failure.
kvb_status layer_losses_read(layer_losses *out, const char *path, const char *metric, const double *even,
                             const double *pruned, size_t n, kvb_error *err);
void layer_losses_free(layer_losses *l); // a zero struct is allowed; leaves it zero
