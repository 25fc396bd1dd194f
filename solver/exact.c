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
    double **const rows[] = {&x->greedy, &x->optimum, &x->loss, &x->bound, &x->surviving};
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
    free(x->loss);
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
        x->loss[r] = certificate_loss(c, 0, x->n_heads, keep);
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
        x->optimum[r] = x->loss[r];
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

// ---- Nested rows ----------------------------------------------------------------------------------------------------

// One group on its way from row to row.
typedef struct nesting {
    core_problem p;
    core_work *w;
    const exact_result *x;
    uint32_t group;
    uint32_t *start; // [n]
    uint32_t *rows;  // [R, n] the candidate
    uint32_t *best;  // [R, n] the best candidate so far
    double excess;   // of the best
    bool given_up;   // the candidate met the limit of work
    uint64_t work;
} nesting;

// Budgets within the limits that sum to what `keep` does: keep, moved into them; what is then missing goes to the first
// heads that have room, what is too much is taken from the first that can give.
static void clip(uint32_t *start, const uint32_t *keep, const core_problem *p)
{
    int64_t left = 0;
    for (uint32_t h = 0; h < p->n; h++) {
        start[h] = p->cap && keep[h] > p->cap[h]       ? p->cap[h]
                   : p->least && keep[h] < p->least[h] ? p->least[h]
                                                       : keep[h];
        left += (int64_t)keep[h] - start[h];
    }
    for (uint32_t h = 0; h < p->n && left != 0; h++) {
        int64_t room = p->cap ? (int64_t)p->cap[h] - start[h] : (int64_t)p->least[h] - start[h];
        int64_t take = llabs(room) < llabs(left) ? room : left;
        start[h] = (uint32_t)(start[h] + take);
        left -= take;
    }
}

// Row r under the limit of the neighbour that is done, one row back or ahead.
static kvb_status nest_row(nesting *s, uint32_t r, bool upwards, kvb_error *err)
{
    core_problem p = s->p;
    uint32_t *keep = s->rows + (size_t)r * p.n;
    const uint32_t *neighbour = upwards ? keep - p.n : keep + p.n;
    bool nested = true;
    memcpy(keep, s->x->keep + (size_t)r * s->x->n_heads + p.first, p.n * sizeof *keep);
    for (uint32_t h = 0; h < p.n; h++) nested &= upwards ? keep[h] <= neighbour[h] : keep[h] >= neighbour[h];
    if (nested) return KVB_OK; // the free optimum is within the limit, so it is the optimum under it too
    p.cap = upwards ? neighbour : NULL;
    p.least = upwards ? NULL : neighbour;
    clip(s->start, keep, &p);
    p.start = s->start;
    p.lambda = s->x->lambda[(size_t)r * s->x->n_groups + s->group];
    core_answer a;
    kvb_status status = core_solve(s->w, &p, keep, &a, err);
    s->work += a.work;
    s->given_up |= !a.proved;
    return status;
}

// The candidate's loss over the optimum, as a share of it, summed over the rows; keeps the candidate if it is the best.
static void judge_rows(nesting *s)
{
    uint32_t n = s->p.n, rows = s->x->n_rows;
    double excess = 0;
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t *free_row = s->x->keep + (size_t)r * s->x->n_heads + s->p.first;
        double least = certificate_loss(s->p.curves, s->p.first, n, free_row);
        double loss = certificate_loss(s->p.curves, s->p.first, n, s->rows + (size_t)r * n);
        if (least > 0) excess += loss / least - 1;
    }
    if (s->given_up || !(excess < s->excess)) return;
    s->excess = excess;
    memcpy(s->best, s->rows, (size_t)rows * n * sizeof *s->best);
}

// Rows one by one, each the optimum between its two neighbours, which stay nested and lose no more than before; until
// nothing changes, or SWEEPS times.
static kvb_status polish(nesting *s, kvb_error *err)
{
    enum { SWEEPS = 3 };
    uint32_t rows = s->x->n_rows, n = s->p.n;
    memcpy(s->rows, s->best, (size_t)rows * n * sizeof *s->rows);
    s->given_up = false; // a row that is given up stays as it is
    bool changed = true;
    for (int sweep = 0; sweep < SWEEPS && changed; sweep++) {
        changed = false;
        for (uint32_t r = 0; r < rows; r++) {
            uint32_t *keep = s->rows + (size_t)r * n;
            core_problem p = s->p;
            core_answer a;
            memcpy(s->start, keep, n * sizeof *keep);
            p.start = s->start;
            p.cap = r > 0 ? keep - n : NULL;
            p.least = r + 1 < rows ? keep + n : NULL;
            p.lambda = s->x->lambda[(size_t)r * s->x->n_groups + s->group];
            kvb_status status = core_solve(s->w, &p, keep, &a, err);
            if (status != KVB_OK) return status;
            s->work += a.work;
            changed |= memcmp(keep, s->start, n * sizeof *keep) != 0;
        }
    }
    judge_rows(s);
    return KVB_OK;
}

static kvb_status nest_group(nesting *s, const allocation *greedy, kvb_error *err)
{
    uint32_t rows = s->x->n_rows, n = s->p.n;
    kvb_status status = KVB_OK;
    s->excess = INFINITY;
    for (uint32_t r = 0; r < rows; r++)
        memcpy(s->rows + (size_t)r * n, greedy->keep + (size_t)r * s->x->n_heads + s->p.first, n * sizeof *s->rows);
    judge_rows(s);
    for (uint32_t quarter = 0; quarter <= 4; quarter++) {
        uint32_t from = (rows - 1) * quarter / 4;
        memcpy(s->rows + (size_t)from * n, s->x->keep + (size_t)from * s->x->n_heads + s->p.first, n * sizeof *s->rows);
        s->given_up = false;
        for (uint32_t r = from + 1; r < rows && status == KVB_OK && !s->given_up; r++)
            status = nest_row(s, r, true, err);
        for (uint32_t r = from; r-- > 0 && status == KVB_OK && !s->given_up;) status = nest_row(s, r, false, err);
        if (status != KVB_OK) return status;
        judge_rows(s);
        if (s->excess <= 0) return KVB_OK; // the free optima are nested
    }
    return polish(s, err);
}

static kvb_status nest_alone(exact_result *x, const loss_curves *c, const allocation *greedy,
                             const exact_limits *limits, uint32_t group, uint64_t *work, kvb_error *err)
{
    core_problem p = problem_of(x, c, limits, group);
    if (p.max_work > EXACT_NEST_WORK) p.max_work = EXACT_NEST_WORK;
    size_t cells = (size_t)x->n_rows * p.n;
    uint32_t *budgets = malloc((2 * cells + p.n) * sizeof *budgets);
    core_work *w = core_work_new();
    kvb_status status;
    if (budgets && w) {
        nesting s = {.p = p, .w = w, .x = x, .group = group};
        s.rows = budgets;
        s.best = budgets + cells;
        s.start = budgets + 2 * cells;
        status = nest_group(&s, greedy, err);
        for (uint32_t r = 0; r < x->n_rows && status == KVB_OK; r++)
            memcpy(x->keep + (size_t)r * x->n_heads + p.first, s.best + (size_t)r * p.n, p.n * sizeof *budgets);
        *work = s.work;
    } else {
        status = kvb_fail(err, KVB_MEMORY, "exact solution: not enough memory for nested rows");
    }
    free(budgets);
    core_work_free(w);
    return status;
}

kvb_status exact_nest(exact_result *x, const loss_curves *c, const allocation *greedy, const exact_limits *limits,
                      kvb_error *err)
{
    if (x->n_heads != shape_heads(&c->shape) || greedy->n_heads != x->n_heads || greedy->n_rows != x->n_rows ||
        greedy->n_groups != x->n_groups)
        return kvb_fail(err, KVB_ARGUMENT,
                        "exact solution: result, curves and greedy's budgets are of different shapes");
    outcome all = {0};
#pragma omp parallel for schedule(dynamic) if (x->n_groups > 1)
    for (uint32_t group = 0; group < x->n_groups; group++) {
        kvb_error error = {0};
        uint64_t work = 0;
        kvb_status status = nest_alone(x, c, greedy, limits, group, &work, &error);
        merge(&all, status, &error, work);
    }
    if (all.status == KVB_OK) close_rows(x, c);
    return finish(&all, x, err);
}
