// Compares the solver's budgets, question by question, with those of other methods, and with budgets solved as if the
// metric ranked perfectly ("without the optimality gap", LU-KV section 5.4; methods.md 2.9). All keep the same number
// of tokens, protect the same ones, and evict by the same metric.
#pragma once
#include "study/pairs.h"

enum { ABLATION_RATIOS = 19 }; // 5 % to 95 % pruned

enum { WAY_UNIFORM, WAY_PYRAMID, WAY_ADA, WAY_ADA_POOLED, WAY_NO_GAP, WAY_OPTIMUM, N_WAYS, N_FIXED_WAYS = WAY_NO_GAP };
extern const char *const ablation_ways[N_WAYS];

typedef struct ablation {
    pair_set pairs;
    study_options options;
    uint32_t n_heads;
    double ratios[ABLATION_RATIOS];
    double loss[N_WAYS][ABLATION_RATIOS]; // shares of a question's mass, means over the questions
    double *head_loss[N_WAYS];            // [RATIOS, N] the same for every head
    uint32_t *fixed[N_FIXED_WAYS];        // [RATIOS, N] budgets that do not depend on the question
    size_t fixed_context;                 // the context that they are made for
} ablation;

// Prepares a comparison. Of the options, loss (LOSS_BEST counts as LOSS_IMPORTANCE), limits, scope, hull, min_keep and
// protection are used. Errors: those of pairs_open(). The caller calls ablation_free(), also after a failure.
kvb_status ablation_open(ablation *x, const selection *from, const char *metric, const study_options *o,
                         kvb_error *err);
kvb_status ablation_run(ablation *x, study_progress *progress, kvb_error *err); // fills loss and head_loss
void ablation_free(ablation *x);
