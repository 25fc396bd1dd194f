#include "solver/problem.h"
#include "formats/need.h"
#include "solver/constrained.h"
#include <string.h>

void problem_init(problem *p, const cache_shape *shape, const solve_options *options)
{
    uint32_t rows = options->n_rows;
    *p = (problem){.options = *options, .curves = loss_curves_make(shape)};
    hulls_init(&p->hulls, shape);
    allocation_init(&p->allocation, shape, options->scope, rows);
    p->loss = need(rows, sizeof *p->loss, "losses");
    p->bound = need(rows, sizeof *p->bound, "losses");
    p->lambda = need(rows, sizeof *p->lambda, "multipliers");
}

void problem_free(problem *p)
{
    loss_curves_free(&p->curves);
    hulls_free(&p->hulls);
    allocation_free(&p->allocation);
    free_all(p->loss, p->bound, p->lambda);
    *p = (problem){0};
}

// Under constraints; the multipliers in the allocation are means over the groups.
static kvb_status solve_limited(problem *p, const loss_curves *curves, kvb_error *err)
{
    allocation *a = &p->allocation;
    solved_rows rows;
    kvb_status status = constrained_solve(&rows, curves, p->options.limits, p->options.ratios, a->n_rows, false, err);
    if (status) return status;
    double scale = curves->total > 0 ? 1 / curves->total : 0;
    memcpy(a->keep, rows.keep, (size_t)a->n_rows * a->n_heads * sizeof *a->keep);
    memcpy(a->saturated, rows.saturated, a->n_rows);
    for (uint32_t r = 0; r < a->n_rows; r++) {
        for (uint32_t k = 0; k < a->n_groups; k++) a->lambda[(size_t)r * a->n_groups + k] = rows.lambda[r];
        p->lambda[r] = rows.lambda[r] * scale;
        p->loss[r] = rows.loss[r] * scale;
        p->bound[r] = rows.bound[r] * scale;
    }
    solved_rows_free(&rows);
    return KVB_OK;
}

kvb_status problem_solve_curves(problem *p, const loss_curves *curves, kvb_error *err)
{
    if (p->options.limits) return solve_limited(p, curves, err);
    allocation *a = &p->allocation;
    kvb_status status = hulls_fill(&p->hulls, curves, p->options.hull, err);
    if (!status) status = greedy_sweep(a, curves, &p->hulls, p->options.ratios, err);
    if (!status) status = certificate_rows(curves, a->n_rows, a->n_groups, a->keep, a->lambda, p->loss, p->bound, err);
    if (status) return status;
    double scale = curves->total > 0 ? 1 / curves->total : 0;
    for (uint32_t r = 0; r < a->n_rows; r++) {
        double lambda = 0;
        for (uint32_t k = 0; k < a->n_groups; k++) lambda += a->lambda[(size_t)r * a->n_groups + k];
        p->lambda[r] = lambda / a->n_groups * scale;
        p->loss[r] *= scale;
        p->bound[r] *= scale;
    }
    return KVB_OK;
}

kvb_status problem_solve(problem *p, kvb_error *err)
{
    return problem_solve_curves(p, &p->curves, err);
}
