#include "study/pair_sums.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

void pair_sums_init(pair_sums *p, const cache_shape *longest, uint32_t steps, uint32_t n_rows)
{
    loss_mean_init_coarse(&p->mean, longest, steps);
    ratio_mean_init(&p->best, n_rows, shape_heads(longest));
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

kvb_status pair_sums_mean_ratio(double *table, const pair_sums *const *parts, uint32_t n, kvb_error *err)
{
    size_t cells = n ? (size_t)parts[0]->best.n_rows * parts[0]->best.n_heads : 0;
    uint64_t count = 0;
    for (uint32_t k = 0; k < n; k++) count += parts[k]->best.count;
    if (count == 0) return kvb_fail(err, KVB_ARGUMENT, "study: a table needs at least one question");
    for (size_t i = 0; i < cells; i++) {
        table[i] = 0;
        for (uint32_t k = 0; k < n; k++) table[i] += parts[k]->best.sum[i] / (double)count;
    }
    return KVB_OK;
}

kvb_status pair_sums_mean_loss(double *table, const pair_sums *const *parts, uint32_t n, double shrink,
                               const solve_options *options, kvb_error *err)
{
    if (n == 0) return kvb_fail(err, KVB_ARGUMENT, "study: a table needs at least one question");
    const cache_shape *grid = &parts[0]->mean.curves.shape;
    loss_mean all;
    problem p;
    loss_mean_init_coarse(&all, grid, grid->n_tokens);
    for (uint32_t k = 0; k < n; k++) loss_mean_join(&all, &parts[k]->mean);
    loss_mean_finish(&all);
    loss_curves_shrink(&all.curves, shrink);
    problem_init(&p, grid, options);
    kvb_status status = problem_solve_curves(&p, &all.curves, err);
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
    uint32_t used = 0;
    for (uint32_t k = 0; k < n; k++) {
        const cache_shape *grid = &parts[k]->mean.curves.shape;
        if (parts[k]->mean.count == 0) continue;
        loss_mean_init_coarse(&texts[used], grid, grid->n_tokens);
        loss_mean_join(&texts[used], &parts[k]->mean);
        loss_mean_finish(&texts[used++]);
    }
    kvb_status status = robust_solve(&x, texts, used, tail, options, err);
    if (status == KVB_OK) memcpy(table, x.prune_ratio, (size_t)x.n_rows * x.n_heads * sizeof *table);
    robust_free(&x);
    for (uint32_t k = 0; k < used; k++) loss_mean_free(&texts[k]);
    free(texts);
    return status;
}
