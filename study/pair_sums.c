#include "study/pair_sums.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

kvb_status pair_sums_init(pair_sums *p, const cache_shape *longest, uint32_t steps, uint32_t n_rows, kvb_error *err)
{
    *p = (pair_sums){.mean = {.count = 0}};
    kvb_status status = loss_mean_init_coarse(&p->mean, longest, steps, err);
    if (status == KVB_OK) status = ratio_mean_init(&p->best, n_rows, shape_heads(longest), err);
    if (status != KVB_OK) pair_sums_free(p);
    return status;
}

void pair_sums_free(pair_sums *p)
{
    loss_mean_free(&p->mean);
    ratio_mean_free(&p->best);
}

kvb_status pair_sums_add(pair_sums *p, const problem *pair, kvb_error *err)
{
    kvb_status status = loss_mean_add(&p->mean, &pair->curves, err);
    if (status == KVB_OK) ratio_mean_add(&p->best, &pair->allocation, pair->curves.shape.n_tokens);
    return status;
}

// Number of f64 cells that a mean of losses holds as gains.
static size_t gain_cells(const loss_mean *m)
{
    return (size_t)shape_heads(&m->curves.shape) * shape_middle(&m->curves.shape);
}

kvb_status pair_sums_without(pair_sums *out, const pair_sums *from, const problem *pair, kvb_error *err)
{
    memcpy(out->mean.curves.gain, from->mean.curves.gain, gain_cells(&from->mean) * sizeof(double));
    out->mean.floors = from->mean.floors;
    out->mean.count = from->mean.count;
    size_t cells = (size_t)from->best.n_rows * from->best.n_heads;
    out->best.count = from->best.count - 1;
    for (size_t i = 0; i < cells; i++)
        out->best.sum[i] = from->best.sum[i] - (1.0 - (double)pair->allocation.keep[i] / pair->curves.shape.n_tokens);
    return loss_mean_remove(&out->mean, &pair->curves, err);
}

kvb_status pair_sums_mean_ratio(double *table, const pair_sums *const *parts, uint32_t n, kvb_error *err)
{
    size_t cells = n ? (size_t)parts[0]->best.n_rows * parts[0]->best.n_heads : 0;
    uint64_t count = 0;
    for (uint32_t k = 0; k < n; k++) count += parts[k]->best.count;
    if (count == 0) return kvb_fail(err, KVB_ARGUMENT, "study: a table from no pairs");
    for (size_t i = 0; i < cells; i++) {
        table[i] = 0;
        for (uint32_t k = 0; k < n; k++) table[i] += parts[k]->best.sum[i] / (double)count;
    }
    return KVB_OK;
}

kvb_status pair_sums_mean_loss(double *table, const pair_sums *const *parts, uint32_t n, double shrink,
                               const solve_options *options, kvb_error *err)
{
    if (n == 0) return kvb_fail(err, KVB_ARGUMENT, "study: a table from no pairs");
    const cache_shape *grid = &parts[0]->mean.curves.shape;
    loss_mean all;
    problem p = {.loss = NULL};
    kvb_status status = loss_mean_init_coarse(&all, grid, grid->n_tokens, err);
    if (status != KVB_OK) return status;
    for (uint32_t k = 0; k < n; k++) loss_mean_join(&all, &parts[k]->mean, 1);
    loss_mean_finish(&all);
    loss_curves_shrink(&all.curves, shrink);
    status = problem_init(&p, grid, options, err);
    if (status == KVB_OK) status = problem_solve_curves(&p, &all.curves, err);
    size_t cells = (size_t)options->n_rows * shape_heads(grid);
    for (size_t i = 0; i < cells && status == KVB_OK; i++)
        table[i] = 1.0 - (double)p.allocation.keep[i] / grid->n_tokens;
    problem_free(&p);
    loss_mean_free(&all);
    return status;
}

kvb_status pair_sums_tail(double *table, const pair_sums *const *parts, uint32_t n, double tail,
                          const solve_options *options, kvb_error *err)
{
    loss_mean *texts = need(n, sizeof *texts, "texts");
    robust_result x = {0};
    kvb_status status = KVB_OK;
    uint32_t used = 0;
    for (uint32_t k = 0; k < n && status == KVB_OK; k++) {
        const cache_shape *grid = &parts[k]->mean.curves.shape;
        if (parts[k]->mean.count == 0) continue;
        status = loss_mean_init_coarse(&texts[used], grid, grid->n_tokens, err);
        if (status != KVB_OK) break;
        loss_mean_join(&texts[used], &parts[k]->mean, 1);
        loss_mean_finish(&texts[used++]);
    }
    if (status == KVB_OK) status = robust_solve(&x, texts, used, tail, options, 0, err);
    if (status == KVB_OK) memcpy(table, x.prune_ratio, (size_t)x.n_rows * x.n_heads * sizeof *table);
    robust_free(&x);
    for (uint32_t k = 0; k < used; k++) loss_mean_free(&texts[k]);
    free(texts);
    return status;
}
