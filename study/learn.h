// Fits a ranking to a record: it predicts which tokens are worth keeping from the scores of cheap metrics.
//
// Per KV head, over the tokens j of all texts that are not sinks, a ridge regression with weights:
//     target     y_j = log(I_j / mean I + 0.001), I_j the oracle importance over the text's questions (their mean, or
//                their maximum), mean I over all heads and tokens of the text
//     weight     (I_j / mean I + 0.001)^exponent, with a sum of 1 for each text
//     features   z and z |z| of every metric, standardised over the head's tokens in this text, or if frozen in all;
//                with layer_mean also the mean of z over the layer's KV heads; recency -log(T - j); 1
// This is the form that KVzap, arXiv 2601.07891, fits to hidden states, here on features that an engine has anyway.
// Lambda and exponent are chosen by the least loss of oracle importance on texts that were left out.
#pragma once
#include "formats/table_write.h"
#include "runtime/rank.h"
#include "study/progress.h"
#include "study/selection.h"

enum { LEARN_RATIOS = 3, LEARN_FOLDS_MAX = 8, LEARN_TRIALS_MAX = KVB_RANK_FEATURES_MAX + 12 };
extern const double LEARN_RATIO[LEARN_RATIOS]; // 0.5, 0.8, 0.9: where losses are compared

typedef enum learn_target { TARGET_MEAN, TARGET_MAX } learn_target;

typedef struct learn_options {
    learn_target target;
    double lambda, exponent; // NAN: chosen by held-out loss
    bool layer_mean;         // every metric's mean over the layer's heads is a feature too; no effect with one head
    uint32_t sink;           // first tokens that take no part
    bool frozen;             // standardised by the means and deviations of all texts together, not of each
} learn_options;

// One attempt and its loss on texts left out: shares of the importance that can be lost, means over the texts, with the
// budgets that are best for each text.
typedef struct learn_trial {
    double lambda, exponent; // of a fit
    double loss[LEARN_RATIOS];
    double score; // geometric mean of the losses
} learn_trial;

typedef struct learned {
    const selection *from; // whose metrics are the features
    learn_options options; // with the lambda and exponent that were chosen
    uint32_t n_folds;
    int logarithm[KVB_RANK_FEATURES_MAX]; // of the selection's metrics: 1 if log(score) is the feature
    double *moments;                      // if frozen: [metrics, L, G, 2], mean and 1 / deviation over all texts
    double *weights;                      // [1 + n_folds, L, G, P], columns as in kvb_ranking_info
    learn_trial trials[LEARN_TRIALS_MAX]; // each metric's own order, then fits to all metrics with other settings
    uint32_t n_trials, chosen;            // trials: all; with the final settings
    char (*contexts)[65];                 // [from->n_contexts] SHA-256 of token ids
    uint32_t *fold;                       // [from->n_contexts] contexts of the same tokens share a fold
} learned;

// Fits a ranking; needs at least two different texts. Layers with a sliding window, which records leave out, have no
// ranking. Errors: KVB_ARGUMENT (too few texts, too many metrics, nothing to fit), those of reading the record,
// KVB_NUMERIC (a singular system), KVB_INTERRUPTED. The caller frees, also after a failure; `from` must outlive the
// result.
kvb_status learn_fit(learned *out, const selection *from, const learn_options *o, study_progress *progress,
                     kvb_error *err);
void learn_free(learned *l);

// Writes the ranking; name[24] receives its metric's name. Errors: those of rank_write().
kvb_status learn_write(const learned *l, const char *path, char name[24], kvb_error *err);
