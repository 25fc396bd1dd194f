// What a ranking loses on a text that it was not fitted on, under the budgets that are best for that text.
#include "formats/need.h"
#include "solver/problem.h"
#include "study/learn_parts.h"
#include <math.h>
#include <stdlib.h>

const double LEARN_RATIO[LEARN_RATIOS] = {0.5, 0.8, 0.9};

// scores [N, T]: the linear form, as kvb_rank_layer() has it, of features that are standardised already.
static void rank_text(float *scores, const learn_text *t, const learn_systems *s, uint32_t set, const double *weights)
{
    size_t T = t->shape.n_tokens, heads = shape_heads(&t->shape), L = t->shape.n_layers, n = 0;
    size_t metric[KVB_RANK_FEATURES_MAX];
    for (uint32_t f = 0; f < s->n_features; f++)
        if (set >> f & 1) metric[n++] = f;
    size_t P = learn_columns((uint32_t)n, s->layer_mean);
#pragma omp parallel for schedule(static)
    for (size_t h = 0; h < heads; h++) {
        const double *w = weights + h * P;
        size_t layer = h / t->shape.n_kv_heads;
        for (size_t j = 0; j < T; j++) {
            double sum = w[P - 1] - w[P - 2] * log((double)(T - j));
            for (size_t i = 0; i < n; i++) {
                double z = t->z[(metric[i] * heads + h) * T + j];
                sum += z * (w[2 * i] + w[2 * i + 1] * fabs(z));
                if (s->layer_mean) sum += w[2 * n + i] * t->layer[(metric[i] * L + layer) * T + j];
            }
            scores[h * T + j] = (float)sum;
        }
    }
}

static kvb_status add_losses(learn_trial *trial, const learn_text *t, const float *scores, kvb_error *err)
{
    const solve_options options = {HULL_FEASIBLE, SCOPE_GLOBAL, LEARN_RATIO, LEARN_RATIOS, NULL};
    metric_order order = {0};
    problem p = {0};
    kvb_status status = metric_order_make(&order, &t->shape, scores, err);
    if (status == KVB_OK) status = problem_init(&p, &t->shape, &options, err);
    if (status == KVB_OK) status = loss_curves_fill(&p.curves, &order, t->mean, err);
    if (status == KVB_OK) status = problem_solve(&p, err);
    for (int i = 0; i < LEARN_RATIOS && status == KVB_OK; i++) trial->loss[i] += p.loss[i];
    problem_free(&p);
    metric_order_free(&order);
    return status;
}

kvb_status learn_try(learn_trial *trial, const learn_systems *s, const learn_text *t, uint32_t fold, kvb_error *err)
{
    size_t heads = shape_heads(&t->shape), T = t->shape.n_tokens;
    if (trial->plain) {
        const float *own = t->plain + (size_t)__builtin_ctz(trial->set) * heads * T;
        return add_losses(trial, t, own, err);
    }
    size_t columns = learn_columns((uint32_t)__builtin_popcount(trial->set), s->layer_mean);
    float *scores = need(heads * T, sizeof *scores, "scores");
    double *weights = need(heads * columns, sizeof *weights, "weights");
    kvb_status status = learn_systems_solve(s, trial->set, trial->lambda, fold, weights, err);
    if (status == KVB_OK) {
        rank_text(scores, t, s, trial->set, weights);
        status = add_losses(trial, t, scores, err);
    }
    free(scores);
    free(weights);
    return status;
}
