#include "study/table.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/constrained.h"
#include "study/table_allocate.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

kvb_status study_table_open(study_table *t, const selection *from, const char *metric, const study_options *o,
                            bool pair_budgets, kvb_error *err)
{
    *t = (study_table){.options = *o};
    kvb_status status = pairs_open(&t->pairs, from, metric, o, err);
    if (status == KVB_OK) status = layer_map_read(&t->layers, from->r, err);
    if (status != KVB_OK) return status;
    size_t heads = shape_heads(&t->pairs.longest), cells = ROWS * heads, bytes = 0;
    if (__builtin_mul_overflow(cells, (size_t)t->pairs.n_pairs, &bytes) ||
        __builtin_mul_overflow(bytes, sizeof *t->pair_budgets, &bytes))
        return kvb_fail(err, KVB_UNSUPPORTED, "%u problems of %zu heads are too many", t->pairs.n_pairs, heads);
    t->n_heads = (uint32_t)heads;
    t->prune_ratio = need(cells, sizeof *t->prune_ratio, "ratios");
    t->std = need(cells, sizeof *t->std, "ratios");
    t->pair_budgets = pair_budgets ? need(1, bytes, "bytes of budgets") : NULL;
    t->text_weights = need(ROWS * from->n_contexts, sizeof *t->text_weights, "weights of texts");
    return KVB_OK;
}

void study_table_free(study_table *t)
{
    pairs_close(&t->pairs);
    layer_map_free(&t->layers);
    free(t->prune_ratio);
    free(t->std);
    free(t->pair_budgets);
    free(t->text_weights);
    *t = (study_table){.n_heads = 0};
}

kvb_status require_ratios(const study_options *o, const loss_curves *c, kvb_error *err)
{
    if (!o->limits || !o->own_ratios) return KVB_OK;
    return constrained_require(c, o->limits, o->ratios, o->n_rows, err);
}

// ---- First reading: every pair's own optimum, and what the aggregation needs of it ----------------------------------

static kvb_status take_pair(study_table *t, gathered *g, ratio_mean *spread, pair_walk *w, kvb_error *err)
{
    problem *p = &w->problem;
    double start = study_seconds();
    kvb_status status = t->options.oracle_order ? loss_curves_fill_perfect(&p->curves, w->oracle, err) : KVB_OK;
    if (status == KVB_OK && g->how == AGGREGATE_MEAN_RATIO) status = require_ratios(&t->options, &p->curves, err);
    if (status == KVB_OK) status = gather_add(g, w->context, &p->curves, err);
    if (status == KVB_OK) status = allocate_pair(t, spread, p, err);
    t->solve_seconds += study_seconds() - start;
    return status;
}

static kvb_status read_pairs(study_table *t, gathered *g, ratio_mean *spread, study_progress *progress, kvb_error *err)
{
    pair_walk w;
    solve_options solve = study_solve_options(&t->options);
    kvb_status status = KVB_OK;
    pair_walk_open(&w, &t->pairs, &solve, t->options.min_keep, progress);
    while (status == KVB_OK && (status = pair_walk_next(&w, err)) == KVB_OK && !w.ended)
        status = pair_walk_name(&w, take_pair(t, g, spread, &w, err), err);
    pair_walk_close(&w);
    return status;
}

// ---- Second reading: what the table loses ---------------------------------------------------------------------------

static kvb_status judge_pair(study_table *t, const double *uniform, const loss_curves *c, kvb_error *err)
{
    kvb_status status = judge_table(t->table_loss, c, t->options.limits, ROWS, t->prune_ratio, err);
    return status == KVB_OK ? judge_table(t->uniform_loss, c, NULL, ROWS, uniform, err) : status;
}

kvb_status study_table_judge(study_table *t, study_progress *progress, kvb_error *err)
{
    pair_walk w;
    size_t cells = (size_t)ROWS * t->n_heads;
    double *uniform = need(cells, sizeof *uniform, "ratios");
    memset(t->table_loss, 0, sizeof t->table_loss);
    memset(t->uniform_loss, 0, sizeof t->uniform_loss);
    memset(t->effective, 0, sizeof t->effective);
    for (size_t i = 0; i < cells; i++) uniform[i] = t->options.ratios[i / t->n_heads];
    solve_options solve = study_solve_options(&t->options);
    kvb_status status = KVB_OK;
    pair_walk_open(&w, &t->pairs, &solve, t->options.min_keep, progress);
    while (status == KVB_OK && (status = pair_walk_next(&w, err)) == KVB_OK && !w.ended)
        status = pair_walk_name(&w, judge_pair(t, uniform, &w.problem.curves, err), err);
    pair_walk_close(&w);
    free(uniform);
    for (int r = 0; r < ROWS && status == KVB_OK; r++) {
        t->table_loss[r] /= t->pairs.n_pairs;
        t->uniform_loss[r] /= t->pairs.n_pairs;
        for (uint32_t h = 0; h < t->n_heads; h++)
            t->effective[r] += t->prune_ratio[(size_t)r * t->n_heads + h] / t->n_heads;
    }
    return status;
}

// ---- The whole ------------------------------------------------------------------------------------------------------

kvb_status study_table_solve(study_table *t, study_progress *progress, kvb_error *err)
{
    gathered g;
    ratio_mean spread = {0};
    study_progress_begin(progress, 2.0 * t->pairs.n_pairs); // to solve, and to judge the table
    kvb_status status = gather_init(&g, &t->pairs, t->options.aggregate, err);
    if (status == KVB_OK) status = ratio_mean_init(&spread, ROWS, t->n_heads, err);
    if (status == KVB_OK) status = read_pairs(t, &g, &spread, progress, err);
    if (status == KVB_OK) {
        ratio_mean_get(&spread, t->prune_ratio, t->std);
        gather_average(&g);
        status = bound_table(t, &g, err);
    }
    if (status == KVB_OK) {
        gather_pull(&g, t->options.shrink);
        status = allocate_table(t, &g, err);
    }
    for (int r = 0; r < ROWS && status == KVB_OK; r++) {
        bool own = t->options.aggregate == AGGREGATE_MEAN_RATIO && t->options.shrink == 0;
        if (t->options.aggregate != AGGREGATE_MEAN_LOSS) t->table_bound[r] = own ? t->bound[r] : NAN;
    }
    if (status == KVB_OK) status = study_table_judge(t, progress, err);
    ratio_mean_free(&spread);
    gather_free(&g);
    return status;
}
