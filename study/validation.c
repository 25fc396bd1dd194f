#include "study/validation.h"
#include "solver/constrained.h"
#include "solver/exact.h"
#include "study/table.h"

kvb_status validation_open(validation *v, const selection *from, const char *metric, const study_options *o,
                           const double *table, kvb_error *err)
{
    *v = (validation){.options = *o, .table = table};
    return pairs_open(&v->pairs, from, metric, o, err);
}

void validation_free(validation *v)
{
    pairs_close(&v->pairs);
}

// Adds the losses of greedy and of the optimum, times `weight`. p: scratch memory of the curves' shape.
static kvb_status validate_curves(validation *v, problem *p, const loss_curves *c, double weight, kvb_error *err)
{
    const study_options *o = &v->options;
    double start = study_seconds(), middle = start;
    solved_rows x = {0};
    kvb_status status = KVB_OK;
    if (o->limits) {
        status = constrained_solve(&x, c, o->limits, o->ratios, o->n_rows, true, err);
    } else {
        status = problem_solve_curves(p, c, err);
        middle = study_seconds();
        if (status == KVB_OK) status = exact_solve(&x, c, &p->allocation, err);
    }
    v->greedy_seconds += middle - start;
    v->exact_seconds += study_seconds() - middle;
    v->work += x.work;
    v->n_problems++;
    for (uint32_t r = 0; r < x.n_rows && status == KVB_OK; r++) {
        v->greedy[r] += weight * x.greedy[r];
        v->optimum[r] += weight * x.loss[r];
        v->bound[r] += weight * x.bound[r];
        v->unproved[r] += !x.proved[r];
    }
    solved_rows_free(&x);
    return status;
}

static kvb_status take_pair(validation *v, gathered *g, pair_walk *w, kvb_error *err)
{
    loss_curves *c = &w->problem.curves;
    const study_options *o = &v->options;
    kvb_status status = v->table ? judge_table(v->table_loss, c, o->limits, o->n_rows, v->table, err) : KVB_OK;
    if (status == KVB_OK) status = require_ratios(o, c, err);
    if (status != KVB_OK) return status;
    if (g->how == AGGREGATE_MEAN_LOSS) return gather_add(g, w->context, c, err);
    loss_curves_shrink(c, o->shrink);
    return validate_curves(v, &w->problem, c, c->total > 0 ? 1 / (c->total * v->pairs.n_pairs) : 0, err);
}

static kvb_status validate_merged(validation *v, gathered *g, const solve_options *solve, kvb_error *err)
{
    problem p;
    gather_finish(g, v->options.shrink);
    problem_init(&p, &g->all.curves.shape, solve);
    kvb_status status = validate_curves(v, &p, &g->all.curves, 1, err);
    problem_free(&p);
    return status;
}

kvb_status validation_run(validation *v, study_progress *progress, kvb_error *err)
{
    gathered g;
    solve_options solve = study_solve_options(&v->options);
    study_progress_begin(progress, v->pairs.n_pairs);
    gather_init(&g, &v->pairs, v->options.aggregate);
    pair_walk w = pair_walk_open(&v->pairs, solve, v->options.min_keep, progress);
    while (pair_walk_next(&w, err)) w.status = take_pair(v, &g, &w, err);
    kvb_status status = pair_walk_close(&w);
    if (status == KVB_OK && g.how == AGGREGATE_MEAN_LOSS) status = validate_merged(v, &g, &solve, err);
    for (int r = 0; r < ROWS; r++) v->table_loss[r] /= v->pairs.n_pairs;
    gather_free(&g);
    return status;
}
