// What the files of learn.h share.
#pragma once
#include "solver/curve.h"
#include "study/learn.h"

// One text: standardised features and importances.
typedef struct learn_text {
    cache_shape shape;  // with the sinks and the last token protected
    float *z;           // [F, N, T] of every metric of the selection; 0 for sinks
    float *layer;       // [F, L, T] its mean over the layer's heads; NULL without layer_mean
    float *plain;       // [F, N, T] scores as recorded
    float *mean, *top;  // [N, T] importance over the questions: mean, maximum
    double mean_of_all; // mean of `mean` over heads and tokens
} learn_text;

// Room for the longest text of the selection. The caller frees, also after a failure. KVB_ARGUMENT: a text
// that is protected as a whole.
kvb_status learn_text_init(learn_text *t, const learned *l, kvb_error *err);
void learn_text_free(learn_text *t);
kvb_status learn_text_read(learn_text *t, const learned *l, size_t k, kvb_error *err);
// Whether each metric's scores are never negative, in all texts: then their logarithm is the feature.
kvb_status learn_find_signs(learned *l, learn_text *t, kvb_error *err);

// Normal equations A w = b of every fold and head, over all columns: P = 2 F + 2, or 3 F + 2 with layer_mean, in the
// order that weights have (runtime/kvbudget.h).
typedef struct learn_systems {
    uint32_t n_folds, n_heads, n_features;
    bool layer_mean;
    double exponent;
    double *a, *b;     // [folds, N, P, P], [folds, N, P]
    uint32_t *n_texts; // [folds]
} learn_systems;

uint32_t learn_columns(uint32_t n_features, bool layer_mean); // P
learn_systems learn_systems_init(const learned *l, double exponent);
void learn_systems_free(learn_systems *s);
void learn_systems_add(learn_systems *s, const learned *l, const learn_text *t, uint32_t fold);
// weights [N, P] of the metrics in `set`, from all folds but `without` (UINT32_MAX: from all).
kvb_status learn_systems_solve(const learn_systems *s, uint32_t set, double lambda, uint32_t without, double *weights,
                               kvb_error *err);

// Adds to trial->loss what text k, of fold `fold`, loses; s NULL for a plain metric.
kvb_status learn_try(learn_trial *trial, const learn_systems *s, const learn_text *t, uint32_t fold, kvb_error *err);
