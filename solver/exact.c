#include "solver/exact.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/certificate.h"
#include <stdlib.h>

void exact_free(exact_result *x)
{
    free(x->keep);
    free(x->greedy);
    free(x->optimum);
    free(x->bound);
    free(x->proved);
    *x = (exact_result){0};
}

static exact_result make_result(const allocation *greedy)
{
    size_t rows = greedy->n_rows;
    exact_result x = {.n_rows = greedy->n_rows, .n_heads = greedy->n_heads, .n_groups = greedy->n_groups};
    x.keep = need(rows * x.n_heads, sizeof *x.keep, "budgets");
    x.greedy = need(rows, sizeof *x.greedy, "losses");
    x.optimum = need(rows, sizeof *x.optimum, "losses");
    x.bound = need(rows, sizeof *x.bound, "losses");
    x.proved = need(rows, sizeof *x.proved, "ratios");
    return x;
}

// Losses of keep and of greedy's budgets, and bounds. Heads are summed in order, whatever the threads did.
static void close_rows(exact_result *x, const loss_curves *c, const allocation *greedy, const core_answer *answers)
{
    for (uint32_t r = 0; r < x->n_rows; r++) {
        const core_answer *a = answers + (size_t)r * x->n_groups;
        double gap = 0;
        x->proved[r] = 1;
        for (uint32_t g = 0; g < x->n_groups; g++) {
            gap += a[g].gap;
            x->proved[r] &= a[g].proved;
            x->work += a[g].work;
        }
        x->greedy[r] = certificate_loss(c, 0, x->n_heads, greedy->keep + (size_t)r * x->n_heads);
        x->optimum[r] = certificate_loss(c, 0, x->n_heads, x->keep + (size_t)r * x->n_heads);
        double bound = x->greedy[r] - gap;
        // Losses are never negative and the optimum is above any bound, so clipping removes rounding only.
        x->bound[r] = bound < 0 ? 0 : bound > x->optimum[r] ? x->optimum[r] : bound;
    }
}

kvb_status exact_solve(exact_result *x, const loss_curves *c, const allocation *greedy, kvb_error *err)
{
    *x = (exact_result){0};
    if (greedy->n_heads != shape_heads(&c->shape))
        return kvb_fail(err, KVB_ARGUMENT, "exact solution: curves and greedy's budgets are of different shapes");
    for (size_t i = 0; i < (size_t)greedy->n_rows * greedy->n_heads; i++)
        if (greedy->keep[i] < c->floor || greedy->keep[i] > c->shape.n_tokens)
            return kvb_fail(err, KVB_ARGUMENT, "exact solution: greedy's row %zu: expected budgets of %u..%u, found %u",
                            i / greedy->n_heads, c->floor, c->shape.n_tokens, greedy->keep[i]);
    *x = make_result(greedy);
    uint32_t jobs = x->n_rows * x->n_groups, n = x->n_heads / x->n_groups;
    core_answer *answers = need(jobs, sizeof *answers, "rows");
#pragma omp parallel if (jobs > 1 && (size_t)x->n_heads * shape_middle(&c->shape) > PARALLEL_CELLS / 8)
    {
        core_work *w = core_work_new();
#pragma omp for schedule(dynamic)
        for (uint32_t i = 0; i < jobs; i++) {
            const core_problem p = {.curves = c,
                                    .first = i % x->n_groups * n,
                                    .n = n,
                                    .start = greedy->keep + (size_t)i * n,
                                    .lambda = greedy->lambda[i],
                                    .max_work = EXACT_MAX_WORK,
                                    .max_bytes = EXACT_MAX_BYTES};
            core_solve(w, &p, x->keep + (size_t)i * n, &answers[i]);
        }
        core_work_free(w);
    }
    close_rows(x, c, greedy, answers);
    free(answers);
    return KVB_OK;
}
