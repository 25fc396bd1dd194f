// A learned ranking in memory, and the scores it gives. Not part of the public API, which is kvb_rank() and
// kvb_ranking_open().
#pragma once
#include "kvbudget.h"
#include "safetensors.h"

#define KVB_RANK_FOLDS_MAX 64
#define KVB_RANK_LOG_LEAST 1e-12 // smaller scores count as this before the logarithm is taken

// Besides the weights fitted to all texts there is a set for each fold, fitted without that fold's texts. Loss curves
// of those texts are only honest when made with these weights.
struct kvb_ranking {
    kvb_ranking_info info;
    const char *metrics[KVB_RANK_FEATURES_MAX]; // inside `tree`
    int logarithm[KVB_RANK_FEATURES_MAX];
    uint32_t n_folds;
    double *weights;           // [1 + n_folds, L, G, P]: of all texts, then of each fold
    struct cJSON *tree;        // the metadata "ranking"; owns the strings
    const struct cJSON *folds; // in the tree: [n_folds] lists of the SHA-256 of contexts
    char *about, model_sha256[65];
};

// Reads the ranking in a ranking file or a table: metadata "ranking" and tensor "rank_weights". On failure *out is
// NULL. KVB_FORMAT, KVB_NUMERIC, KVB_UNSUPPORTED, KVB_MEMORY.
kvb_status kvb_ranking_read(kvb_ranking **out, const kvb_safetensors *file, kvb_error *err);

// Returns the fold, 1 .. n_folds, whose weights were fitted without the context whose token ids have this SHA-256, or 0
// if no fold has it: then nothing was fitted to this context, and the weights of all texts (fold 0) are honest too.
uint32_t kvb_ranking_fold(const kvb_ranking *r, const char *context_sha256);

// Ranks n_heads KV heads from `head` = l G + g on, with a fold's weights: all heads of a layer as kvb_rank_layer()
// does, or fewer without layer_mean.
//   features  [F] pointers to scores [n_heads, n_tokens]; out [n_heads, n_tokens]
kvb_status kvb_rank_heads(const kvb_ranking *r, uint32_t fold, size_t head, uint32_t n_heads,
                          const float *const *features, uint32_t n_tokens, float *out, kvb_error *err);

// Returns a feature's score, or its logarithm.
double kvb_rank_value(float score, int logarithm);
// Returns the first token whose score is not finite; n_tokens if there is none.
uint32_t kvb_rank_finite(const float *scores, uint32_t n_tokens);
// Computes the mean and 1 / deviation of finite scores over tokens sink .. n_tokens - 1; both are 0 if they are equal.
void kvb_rank_moments(const float *scores, int logarithm, uint32_t sink, uint32_t n_tokens, double *mean,
                      double *scale);
