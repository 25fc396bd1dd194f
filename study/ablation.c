#include "study/ablation.h"
#include "formats/need.h"
#include "runtime/allocate.h"
#include <stdlib.h>

const char *const ablation_ways[N_WAYS] = {"uniform",           "PyramidKV",   "AdaKV",
                                           "AdaKV, all layers", "without gap", "optimum"};
static const double PYRAMID_BETA = 20, ADA_ALPHA = 0.2; // published values
enum { PYRAMID_WINDOW = 8, RATIOS = ABLATION_RATIOS };

// Returns how many tokens greedy keeps over all heads in a row.
static uint64_t total_of(const allocation *a, uint32_t row)
{
    uint64_t sum = 0;
    for (uint32_t h = 0; h < a->n_heads; h++) sum += a->keep[(size_t)row * a->n_heads + h];
    return sum;
}

static void fill_fixed(ablation *x, const pair_walk *w)
{
    const cache_shape *c = &w->problem.curves.shape;
    allocate_shape shape = {c->n_layers, c->n_kv_heads, c->n_tokens};
    for (uint32_t r = 0; r < RATIOS; r++) {
        size_t at = (size_t)r * x->n_heads;
        allocate_uniform(&shape, x->ratios[r], x->fixed[WAY_UNIFORM] + at);
        allocate_pyramid(&shape, x->ratios[r], PYRAMID_BETA, PYRAMID_WINDOW, x->fixed[WAY_PYRAMID] + at);
        allocate_ada(&shape, x->ratios[r], ADA_ALPHA, w->scores, c->sink, c->window, ADA_KVPRESS,
                     x->fixed[WAY_ADA] + at);
        allocate_ada(&shape, x->ratios[r], ADA_ALPHA, w->scores, c->sink, c->window, ADA_GLOBAL,
                     x->fixed[WAY_ADA_POOLED] + at);
        for (int way = 0; way < N_FIXED_WAYS; way++)
            allocate_level(&shape, total_of(&w->problem.allocation, r), shape_protected(c), x->fixed[way] + at);
    }
}

static void add_losses(ablation *x, const loss_curves *c, int way, const uint32_t *keep)
{
    double scale = c->total > 0 ? 1 / (c->total * x->pairs.n_pairs) : 0;
    for (uint32_t r = 0; r < RATIOS; r++)
        for (uint32_t h = 0; h < x->n_heads; h++) {
            double loss = scale * loss_at(c, h, keep[(size_t)r * x->n_heads + h]);
            x->head_loss[way][(size_t)r * x->n_heads + h] += loss;
            x->loss[way][r] += loss;
        }
}

// Solves and judges budgets from curves in the oracle's own order, the best ones if the metric ranked perfectly.
static kvb_status solve_without_gap(ablation *x, const pair_walk *w, kvb_error *err)
{
    problem perfect;
    const loss_curves *c = &w->problem.curves;
    problem_init(&perfect, &c->shape, &w->solve);
    kvb_status status = loss_curves_fill_perfect(&perfect.curves, w->oracle, err);
    if (status == KVB_OK) status = problem_solve(&perfect, err);
    if (status == KVB_OK) add_losses(x, c, WAY_NO_GAP, perfect.allocation.keep);
    problem_free(&perfect);
    return status;
}

static kvb_status compare_pair(ablation *x, pair_walk *w, kvb_error *err)
{
    problem *p = &w->problem;
    kvb_status status = problem_solve(p, err);
    if (status != KVB_OK) return status;
    if (x->fixed_context != w->context) fill_fixed(x, w);
    x->fixed_context = w->context;
    for (int way = 0; way < N_FIXED_WAYS; way++) add_losses(x, &p->curves, way, x->fixed[way]);
    add_losses(x, &p->curves, WAY_OPTIMUM, p->allocation.keep);
    return solve_without_gap(x, w, err);
}

kvb_status ablation_open(ablation *x, const selection *from, const char *metric, const study_options *o, kvb_error *err)
{
    *x = (ablation){.options = *o, .fixed_context = from->n_contexts};
    if (o->loss == LOSS_BEST) x->options.loss = LOSS_IMPORTANCE;
    for (int r = 0; r < RATIOS; r++) x->ratios[r] = 5 * (r + 1) / 100.0;
    kvb_status status = pairs_open(&x->pairs, from, metric, &x->options, err);
    if (status != KVB_OK) return status;
    x->n_heads = shape_heads(&x->pairs.longest);
    for (int w = 0; w < N_FIXED_WAYS; w++) x->fixed[w] = need((size_t)RATIOS * x->n_heads, sizeof(uint32_t), "budgets");
    for (int w = 0; w < N_WAYS; w++) x->head_loss[w] = need((size_t)RATIOS * x->n_heads, sizeof(double), "losses");
    return KVB_OK;
}

kvb_status ablation_run(ablation *x, study_progress *progress, kvb_error *err)
{
    const study_options *o = &x->options;
    const solve_options solve = {o->hull, o->scope, x->ratios, RATIOS, o->limits};
    study_progress_begin(progress, x->pairs.n_pairs);
    pair_walk w = pair_walk_open(&x->pairs, solve, o->min_keep, progress);
    while (pair_walk_next(&w, err)) w.status = compare_pair(x, &w, err);
    return pair_walk_close(&w);
}

void ablation_free(ablation *x)
{
    for (int w = 0; w < N_FIXED_WAYS; w++) free(x->fixed[w]);
    for (int w = 0; w < N_WAYS; w++) free(x->head_loss[w]);
    pairs_close(&x->pairs);
    *x = (ablation){.n_heads = 0};
}
