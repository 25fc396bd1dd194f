#include "study/table_allocate.h"
#include "solver/constrained.h"
#include "solver/exact.h"
#include "solver/robust.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- The optimum in place of greedy's budgets: `weight` times losses that are shares of the problem's total ---------

static kvb_status improve_limited(study_table *t, problem *p, const loss_curves *c, double weight, kvb_error *err)
{
    allocation *a = &p->allocation;
    constrained_rows x;
    kvb_status status = constrained_solve(&x, c, t->options.limits, t->options.ratios, ROWS, true, err);
    if (status != KVB_OK) return status;
    double scale = c->total > 0 ? 1 / c->total : 0;
    for (int r = 0; r < ROWS; r++) {
        t->greedy[r] += weight * scale * x.greedy[r];
        t->optimum[r] += weight * scale * x.loss[r];
        t->unproved[r] |= !x.proved[r];
        p->loss[r] = scale * x.loss[r];
        p->bound[r] = scale * x.bound[r];
    }
    memcpy(a->keep, x.keep, sizeof *a->keep * ROWS * a->n_heads);
    constrained_rows_free(&x);
    return KVB_OK;
}

static kvb_status improve(study_table *t, problem *p, const loss_curves *c, double weight, kvb_error *err)
{
    if (t->options.limits) return improve_limited(t, p, c, weight, err);
    allocation *a = &p->allocation;
    exact_result x;
    kvb_status status = exact_init(&x, &c->shape, t->options.scope, ROWS, err);
    if (status != KVB_OK) return status;
    status = exact_solve(&x, c, a, NULL, err);
    double scale = c->total > 0 ? 1 / c->total : 0;
    for (int r = 0; status == KVB_OK && r < ROWS; r++) {
        t->greedy[r] += weight * scale * x.greedy[r];
        t->optimum[r] += weight * scale * x.optimum[r];
        t->unproved[r] |= !x.proved[r];
        p->loss[r] = scale * x.optimum[r];
        p->bound[r] = scale * x.bound[r];
    }
    if (status == KVB_OK) memcpy(a->keep, x.keep, sizeof *a->keep * ROWS * a->n_heads);
    exact_free(&x);
    return status;
}

// ---- One pair -------------------------------------------------------------------------------------------------------

static void keep_budgets(study_table *t, size_t pair, const allocation *a)
{
    size_t cells = (size_t)ROWS * a->n_heads;
    for (size_t i = 0; t->pair_budgets && i < cells; i++) t->pair_budgets[pair * cells + i] = (int32_t)a->keep[i];
}

kvb_status allocate_pair(study_table *t, ratio_mean *spread, problem *p, kvb_error *err)
{
    bool own = t->options.aggregate == AGGREGATE_MEAN_RATIO;
    if (own) loss_curves_shrink(&p->curves, t->options.shrink);
    kvb_status status = problem_solve(p, err);
    if (status == KVB_OK && t->options.exact && t->options.aggregate != AGGREGATE_MEAN_LOSS)
        status = improve(t, p, &p->curves, 1.0 / t->pairs.n_pairs, err);
    if (status != KVB_OK) return status;
    const allocation *a = &p->allocation;
    keep_budgets(t, spread->count, a);
    ratio_mean_add(spread, a, p->curves.shape.n_tokens);
    for (int r = 0; own && r < ROWS; r++) {
        t->loss[r] += p->loss[r] / t->pairs.n_pairs;
        t->bound[r] += p->bound[r] / t->pairs.n_pairs;
        t->lambda[r] += p->lambda[r] / t->pairs.n_pairs;
        t->saturated[r] |= a->saturated[r];
    }
    return KVB_OK;
}

// ---- All pairs ------------------------------------------------------------------------------------------------------

// The table from the average problem.
static kvb_status allocate_merged(study_table *t, const loss_curves *c, kvb_error *err)
{
    problem p = {0};
    solve_options solve = study_solve_options(&t->options);
    kvb_status status = require_ratios(&t->options, c, err);
    if (status == KVB_OK) status = problem_init(&p, &c->shape, &solve, err);
    double start = study_seconds();
    if (status == KVB_OK) status = problem_solve_curves(&p, c, err);
    if (status == KVB_OK && t->options.exact) status = improve(t, &p, c, c->total, err);
    t->solve_seconds += study_seconds() - start;
    for (int r = 0; status == KVB_OK && r < ROWS; r++) {
        // The average of shares has a total of 1, or less when there are pairs that cannot lose anything.
        t->loss[r] = p.loss[r] * c->total;
        t->bound[r] = p.bound[r] * c->total;
        t->lambda[r] = p.lambda[r] * c->total;
        t->saturated[r] = p.allocation.saturated[r];
        for (uint32_t h = 0; h < t->n_heads; h++) {
            size_t i = (size_t)r * t->n_heads + h;
            t->prune_ratio[i] = 1.0 - (double)p.allocation.keep[i] / c->shape.n_tokens;
        }
    }
    problem_free(&p);
    return status;
}

kvb_status bound_table(study_table *t, const gathered *g, kvb_error *err)
{
    if (g->how != AGGREGATE_MEAN_LOSS) return KVB_OK;
    problem p = {0};
    const loss_curves *c = &g->all.curves;
    solve_options solve = study_solve_options(&t->options);
    kvb_status status = require_ratios(&t->options, c, err);
    if (status == KVB_OK) status = problem_init(&p, &c->shape, &solve, err);
    if (status == KVB_OK) status = problem_solve_curves(&p, c, err);
    for (int r = 0; status == KVB_OK && r < ROWS; r++) t->table_bound[r] = p.bound[r] * c->total;
    problem_free(&p);
    return status;
}

// The table of the texts that lose most.
static kvb_status allocate_tail(study_table *t, const gathered *g, kvb_error *err)
{
    robust_result x;
    double start = study_seconds();
    solve_options solve = study_solve_options(&t->options);
    kvb_status status = robust_solve(&x, g->texts, (uint32_t)g->n_texts, t->options.tail, &solve, 0, err);
    if (status != KVB_OK) return status;
    t->solve_seconds += study_seconds() - start;
    t->n_texts = g->n_texts;
    memcpy(t->prune_ratio, x.prune_ratio, (size_t)ROWS * x.n_heads * sizeof *x.prune_ratio);
    memcpy(t->text_weights, x.weight, (size_t)ROWS * x.n_texts * sizeof *x.weight);
    memcpy(t->loss, x.loss, sizeof t->loss);
    memcpy(t->bound, x.bound, sizeof t->bound);
    memcpy(t->lambda, x.lambda, sizeof t->lambda);
    memcpy(t->saturated, x.saturated, sizeof t->saturated);
    robust_free(&x);
    return KVB_OK;
}

// Brings the average of many tables back to whole pages and few levels.
static kvb_status project(study_table *t, kvb_error *err)
{
    const study_options *o = &t->options;
    const cache_shape *shape = &t->pairs.longest;
    uint32_t least = shape_floor(shape), given = (uint32_t)ceil(o->min_keep * shape->n_tokens);
    return constrained_project(o->limits, shape, given > least ? given : least, o->ratios, o->n_rows, t->prune_ratio,
                               t->saturated, err);
}

kvb_status allocate_table(study_table *t, const gathered *g, kvb_error *err)
{
    if (g->how == AGGREGATE_MEAN_LOSS) return allocate_merged(t, &g->all.curves, err);
    if (g->how == AGGREGATE_TAIL) return allocate_tail(t, g, err);
    return t->options.limits ? project(t, err) : KVB_OK;
}
