#include "solver/exact.h"
#include "runtime/fail.h"
#include "solver/certificate.h"
#include "solver/exact_core.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

kvb_status exact_init(exact_result *x, const cache_shape *shape, solve_scope scope, uint32_t n_rows, kvb_error *err)
{
    *x = (exact_result){0};
    kvb_status status = cache_shape_check(shape, err);
    if (status) return status;
    size_t n = shape_heads(shape), groups = scope == SCOPE_LAYER ? shape->n_layers : 1, cells, bytes;
    if (n_rows == 0 || __builtin_mul_overflow(n, (size_t)n_rows, &cells) ||
        __builtin_mul_overflow(cells, sizeof(double), &bytes))
        return kvb_fail(err, KVB_ARGUMENT,
                        "exact solution: %u ratios for %zu heads: expected at least one, and no more "
                        "than fit",
                        n_rows, n);
    *x = (exact_result){.n_rows = n_rows, .n_heads = (uint32_t)n, .n_groups = (uint32_t)groups};
    x->keep = calloc(cells, sizeof *x->keep);
    x->lambda = calloc(n_rows * groups, sizeof *x->lambda);
    double **const rows[] = {&x->greedy, &x->optimum, &x->bound, &x->surviving};
    bool ok = x->keep && x->lambda;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) ok &= (*rows[i] = calloc(n_rows, sizeof **rows[i])) != NULL;
    x->nested = calloc(n_rows, 1);
    x->proved = calloc(n_rows, 1);
    if (ok && x->nested && x->proved) return KVB_OK;
    exact_free(x);
    return kvb_fail(err, KVB_MEMORY, "exact solution: not enough memory for %zu heads at %u ratios", n, n_rows);
}

void exact_free(exact_result *x)
{
    free(x->keep);
    free(x->greedy);
    free(x->optimum);
    free(x->bound);
    free(x->surviving);
    free(x->lambda);
    free(x->nested);
    free(x->proved);
    *x = (exact_result){0};
}

static core_problem problem_of(const exact_result *x, const loss_curves *c, const exact_limits *limits, uint32_t group)
{
    uint32_t n = x->n_heads / x->n_groups;
    return (core_problem){.curves = c,
                          .first = group * n,
                          .n = n,
                          .max_work = limits && limits->max_work ? limits->max_work : EXACT_MAX_WORK,
                          .max_bytes = limits && limits->max_bytes ? limits->max_bytes : EXACT_MAX_BYTES};
}

// What threads leave behind: the first error, and the work done.
typedef struct outcome {
    kvb_status status;
    kvb_error error;
    uint64_t work;
} outcome;

static void merge(outcome *all, kvb_status status, const kvb_error *error, uint64_t work)
{
#pragma omp critical(exact_outcome)
    {
        all->work += work;
        if (all->status == KVB_OK && status != KVB_OK) {
            all->status = status;
            all->error = *error;
        }
    }
}

static kvb_status finish(outcome *all, exact_result *x, kvb_error *err)
{
    x->work += all->work;
    return all->status == KVB_OK ? KVB_OK : kvb_fail(err, all->status, "%s", all->error.message);
}

// Losses of keep and whether rows are nested. Heads are summed in order, whatever the threads did.
static void close_rows(exact_result *x, const loss_curves *c)
{
    for (uint32_t r = 0; r < x->n_rows; r++) {
        const uint32_t *keep = x->keep + (size_t)r * x->n_heads;
        x->optimum[r] = certificate_loss(c, 0, x->n_heads, keep);
        x->nested[r] = 1;
        for (uint32_t h = 0; r > 0 && h < x->n_heads; h++) x->nested[r] &= keep[h] <= (keep - x->n_heads)[h];
    }
}

static void close_bounds(exact_result *x, const loss_curves *c, const allocation *greedy, const core_answer *answers)
{
    for (uint32_t r = 0; r < x->n_rows; r++) {
        const core_answer *a = answers + (size_t)r * x->n_groups;
        double gap = 0;
        x->surviving[r] = 0;
        x->proved[r] = 1;
        for (uint32_t g = 0; g < x->n_groups; g++) {
            gap += a[g].gap;
            x->surviving[r] += a[g].surviving / x->n_groups;
            x->proved[r] &= a[g].proved;
            x->lambda[(size_t)r * x->n_groups + g] = a[g].lambda;
        }
        x->greedy[r] = certificate_loss(c, 0, x->n_heads, greedy->keep + (size_t)r * x->n_heads);
        double bound = x->greedy[r] - gap;
        // Losses are never negative and the optimum is above any bound, so clipping removes rounding only.
        x->bound[r] = bound < 0 ? 0 : bound > x->optimum[r] ? x->optimum[r] : bound;
    }
}

kvb_status exact_solve(exact_result *x, const loss_curves *c, const allocation *greedy, const exact_limits *limits,
                       kvb_error *err)
{
    if (x->n_heads != shape_heads(&c->shape) || greedy->n_heads != x->n_heads || greedy->n_rows != x->n_rows ||
        greedy->n_groups != x->n_groups)
        return kvb_fail(err, KVB_ARGUMENT,
                        "exact solution: result, curves and greedy's budgets are of different shapes");
    for (size_t i = 0; i < (size_t)x->n_rows * x->n_heads; i++)
        if (greedy->keep[i] < c->floor || greedy->keep[i] > c->shape.n_tokens)
            return kvb_fail(err, KVB_ARGUMENT, "exact solution: greedy's row %zu: expected budgets of %u..%u, found %u",
                            i / x->n_heads, c->floor, c->shape.n_tokens, greedy->keep[i]);
    uint32_t jobs = x->n_rows * x->n_groups;
    core_answer *answers = calloc(jobs, sizeof *answers);
    if (!answers) return kvb_fail(err, KVB_MEMORY, "exact solution: not enough memory for %u rows", x->n_rows);
    outcome all = {0};
    x->work = 0;
#pragma omp parallel if (jobs > 1 && (size_t)x->n_heads * shape_middle(&c->shape) > PARALLEL_CELLS / 8)
    {
        core_work *w = core_work_new();
        kvb_error error = {0};
        kvb_status status = w ? KVB_OK : kvb_fail(&error, KVB_MEMORY, "exact solution: not enough memory");
        uint64_t work = 0;
#pragma omp for schedule(dynamic)
        for (uint32_t i = 0; i < jobs; i++) {
            if (status != KVB_OK) continue;
            uint32_t row = i / x->n_groups, group = i % x->n_groups;
            core_problem p = problem_of(x, c, limits, group);
            size_t at = (size_t)row * x->n_heads + p.first;
            p.start = greedy->keep + at;
            p.lambda = greedy->lambda[i];
            status = core_solve(w, &p, x->keep + at, &answers[i], &error);
            work += answers[i].work;
        }
        merge(&all, status, &error, work);
        core_work_free(w);
    }
    if (all.status == KVB_OK) {
        close_rows(x, c);
        close_bounds(x, c, greedy, answers);
    }
    free(answers);
    return finish(&all, x, err);
}
