// A learned ranking in memory, and scores by it. Not part of the public API, which is kvb_rank() and
// kvb_ranking_open().
#pragma once
#include "kvbudget.h"
#include "safetensors.h"

#define KVB_RANK_FOLDS_MAX 64
#define KVB_RANK_LOG_LEAST 1e-12 // what a score counts as at the least before its logarithm is taken

// Weights were also fitted with some texts left out, a fold each: the curves of those texts are honest with them only.
struct kvb_ranking {
    kvb_ranking_info info;
    const char *metrics[KVB_RANK_FEATURES_MAX]; // inside `tree`
    int logarithm[KVB_RANK_FEATURES_MAX];
    uint32_t n_folds;
    double *weights;           // [1 + n_folds, L, G, P]: of all texts, then of each fold
    struct cJSON *tree;        // the metadata "ranking"; owns the strings
    const struct cJSON *folds; // in the tree: [n_folds] lists of the SHA-256 of contexts
    char *about, *model_sha256;
};

// Reads what a file, of the ranking alone or a table, says of its ranking: metadata "ranking" and tensor
// "rank_weights". On failure *out is NULL. KVB_FORMAT, KVB_NUMERIC, KVB_UNSUPPORTED, KVB_MEMORY.
kvb_status kvb_ranking_read(kvb_ranking **out, const kvb_safetensors *file, kvb_error *err);

// The fold whose weights have not seen the context with this SHA-256 of its token ids, 1 .. n_folds; 0: weights of all
// texts, which have not seen it either.
uint32_t kvb_ranking_fold(const kvb_ranking *r, const char *context_sha256);

// kvb_rank_layer() with a fold's weights.
kvb_status kvb_rank_layer_fold(const kvb_ranking *r, uint32_t fold, uint32_t layer, const float *const *features,
                               uint32_t n_tokens, float *out, kvb_error *err);
// kvb_rank() with a fold's weights; head = l * G + g. Not for rankings with layer_mean.
kvb_status kvb_rank_fold(const kvb_ranking *r, uint32_t fold, size_t head, const float *const *features,
                         uint32_t n_tokens, float *out, kvb_error *err);
// The same with weights [2 F + 2] that are not in a ranking yet. `name` is for messages.
kvb_status kvb_rank_weights(const double *weights, uint32_t n_features, const int *logarithm, uint32_t sink,
                            const float *const *features, uint32_t n_tokens, float *out, const char *name,
                            kvb_error *err);

// Of a feature's score: the number itself, or its logarithm.
double kvb_rank_value(float score, int logarithm);
// Mean and 1 / deviation of a feature over tokens sink .. n_tokens - 1; both 0 where it does not vary. KVB_NUMERIC for
// a score that is not finite: its token is *bad.
kvb_status kvb_rank_moments(const float *scores, int logarithm, uint32_t sink, uint32_t n_tokens, double *mean,
                            double *scale, uint32_t *bad);
