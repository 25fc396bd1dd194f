#include "solver/constrained.h"
#include "runtime/fail.h"
#include "solver/layered.h"
#include "solver/solving.h"
#include <stdlib.h>
#include <string.h>

void solving_free(solving *s)
{
    for (uint32_t i = 0; s->levels && i < s->x.n_groups * s->x.parts; i++) level_part_free(&s->levels[i]);
    free(s->levels);
    free(s->budget);
    free(s->keep);
    free(s->lambda);
    free(s->price);
    free(s->saturated);
    free(s->least);
    free(s->most);
    constrained_instance_free(&s->x);
}

// ---- Exact ----------------------------------------------------------------------------------------------------------

// Whether groups fall apart into heads that only share a budget.
static bool is_plain(const solving *s)
{
    bool plain = s->levels == NULL;
    for (uint32_t part = 0; part < s->x.n_groups * s->x.parts && plain; part++)
        plain = solving_part_total(s, part, s->x.most) <= s->x.cap[part];
    return plain;
}

static kvb_status solve_group(const solving *s, core_work *core, layered_work *layered, uint32_t row, uint32_t group,
                              uint32_t *keep, core_answer *a, kvb_error *err)
{
    const constrained_instance *x = &s->x;
    uint32_t n = solving_group_heads(s), first = group * n;
    size_t at = (size_t)row * x->n_groups + group;
    const uint32_t *start = s->keep + (size_t)row * shape_heads(&x->curves.shape) + first;
    if (core) {
        core_problem p = {&x->curves,     first,          n, x->least + first, x->most + first, start, s->lambda[at],
                          EXACT_MAX_WORK, EXACT_MAX_BYTES};
        return core_solve(core, &p, keep, a, err);
    }
    layered_problem p = {
        x,     s->levels,      group,          s->budget[at], s->lambda[at], s->price + group * x->parts,
        start, EXACT_MAX_WORK, EXACT_MAX_BYTES};
    return layered_solve(layered, &p, keep, a, err);
}

// Replaces greedy's budgets by the optimum. proved [R].
static kvb_status solve_exactly(solving *s, uint8_t *proved, uint64_t *work, kvb_error *err)
{
    uint32_t n = solving_group_heads(s), all = shape_heads(&s->x.curves.shape), jobs = s->n_rows * s->x.n_groups;
    bool plain = is_plain(s);
    kvb_status status = KVB_OK;
    memset(proved, 1, s->n_rows);
#pragma omp parallel if (jobs > 1 && solving_is_large(s))
    {
        core_work *core = plain ? core_work_new() : NULL;
        layered_work *layered = plain ? NULL : layered_work_new();
        uint32_t *keep = malloc(n * sizeof *keep);
        kvb_error error = {0};
        kvb_status own =
            keep && (core || layered) ? KVB_OK : kvb_fail(&error, KVB_MEMORY, "constraints: not enough memory");
        uint64_t done = 0;
#pragma omp for schedule(dynamic)
        for (uint32_t i = 0; i < jobs; i++) {
            core_answer a;
            if (own != KVB_OK) continue;
            own = solve_group(s, core, layered, i / s->x.n_groups, i % s->x.n_groups, keep, &a, &error);
            if (own != KVB_OK) continue;
            done += a.work;
            memcpy(s->keep + (size_t)(i / s->x.n_groups) * all + i % s->x.n_groups * n, keep, n * sizeof *keep);
#pragma omp atomic
            proved[i / s->x.n_groups] &= (uint8_t)a.proved;
        }
#pragma omp critical(constrained_exact)
        {
            *work += done;
            if (own != KVB_OK && status == KVB_OK) status = kvb_fail(err, own, "%s", error.message);
        }
        core_work_free(core);
        layered_work_free(layered);
        free(keep);
    }
    return status;
}

// ---- Results --------------------------------------------------------------------------------------------------------

static double row_loss(const solving *s, uint32_t row)
{
    uint32_t n = shape_heads(&s->x.curves.shape);
    double sum = 0;
    for (uint32_t h = 0; h < n; h++) sum += instance_curve(&s->x, h)[s->keep[(size_t)row * n + h]];
    return sum;
}

static void close_bounds(const solving *s, constrained_rows *out)
{
    const constrained_instance *x = &s->x;
#pragma omp parallel for schedule(dynamic) if (solving_is_large(s) && s->n_rows > 1)
    for (uint32_t row = 0; row < s->n_rows; row++) {
        double bound = 0, lambda = 0;
        for (uint32_t group = 0; group < x->n_groups; group++) {
            size_t at = (size_t)row * x->n_groups + group;
            for (uint32_t i = group * x->parts; i < (group + 1) * x->parts; i++)
                bound += layered_part_dual(x, s->levels, i, s->price[i], s->lambda[at]);
            bound -= s->lambda[at] * (double)s->budget[at];
            lambda += s->lambda[at] / x->limits->block;
        }
        // Losses are never negative, and budgets within the limits attain theirs, so clipping removes rounding only.
        out->bound[row] = bound < 0 ? 0 : bound > out->loss[row] ? out->loss[row] : bound;
        out->lambda[row] = lambda / x->n_groups;
    }
}

// Units back to tokens, in the caller's order.
static void close_keep(const solving *s, constrained_rows *out)
{
    const constrained_instance *x = &s->x;
    uint32_t n = out->n_heads;
    for (uint32_t row = 0; row < s->n_rows; row++)
        for (uint32_t h = 0; h < n; h++) {
            uint64_t tokens = (uint64_t)s->keep[(size_t)row * n + h] * x->limits->block;
            out->keep[(size_t)row * n + x->origin[h]] =
                tokens < x->shape.n_tokens ? (uint32_t)tokens : x->shape.n_tokens;
        }
}

kvb_status solving_make_budgets(solving *s, kvb_error *err)
{
    const constrained_instance *x = &s->x;
    uint32_t n = shape_heads(&x->curves.shape);
    size_t cells = (size_t)s->n_rows * x->n_groups;
    s->budget = malloc(cells * sizeof *s->budget);
    s->lambda = malloc(cells * sizeof *s->lambda);
    s->keep = malloc((size_t)s->n_rows * n * sizeof *s->keep);
    s->price = calloc((size_t)x->n_groups * x->parts, sizeof *s->price);
    s->saturated = calloc(s->n_rows, 1);
    s->least = calloc(x->n_groups, sizeof *s->least);
    s->most = calloc(x->n_groups, sizeof *s->most);
    if (!s->budget || !s->lambda || !s->keep || !s->price || !s->saturated || !s->least || !s->most)
        return kvb_fail(err, KVB_MEMORY, "constraints: not enough memory for %u heads at %u ratios", n, s->n_rows);
    for (uint32_t part = 0; part < x->n_groups * x->parts; part++) {
        uint64_t most = solving_part_total(s, part, x->most);
        s->most[part / x->parts] += most < x->cap[part] ? most : x->cap[part];
        if (!x->limits->levels) s->least[part / x->parts] += solving_part_total(s, part, x->least);
    }
    kvb_status status = x->limits->levels ? solving_make_levels(s, err) : KVB_OK;
    for (uint32_t g = 0; g + 1 < x->n_groups && status == KVB_OK; g++)
        for (uint32_t k = g + 1; k < x->n_groups && k / x->limits->ranks == g / x->limits->ranks; k++)
            if (s->least[g] > s->most[k] || s->least[k] > s->most[g])
                status =
                    kvb_fail(err, KVB_ARGUMENT,
                             "constraints: ranks %u and %u must keep %llu..%llu and %llu..%llu pages of %u tokens: "
                             "totals cannot be equal",
                             g % x->limits->ranks, k % x->limits->ranks, (unsigned long long)s->least[g],
                             (unsigned long long)s->most[g], (unsigned long long)s->least[k],
                             (unsigned long long)s->most[k], x->limits->block);
    for (uint32_t row = 0; row < s->n_rows && status == KVB_OK; row++) {
        uint64_t *budget = s->budget + (size_t)row * x->n_groups;
        constrained_targets(x, s->ratios[row], budget);
        s->saturated[row] = constrained_clamp(x, s->least, s->most, budget);
    }
    return status;
}

void constrained_rows_free(constrained_rows *rows)
{
    free(rows->keep);
    free(rows->greedy);
    free(rows->loss);
    free(rows->bound);
    free(rows->lambda);
    free(rows->saturated);
    free(rows->proved);
    *rows = (constrained_rows){0};
}

static kvb_status rows_init(constrained_rows *out, uint32_t n_rows, uint32_t n_heads, kvb_error *err)
{
    *out = (constrained_rows){.n_rows = n_rows, .n_heads = n_heads};
    double **const numbers[] = {&out->greedy, &out->loss, &out->bound, &out->lambda};
    bool ok = (out->keep = calloc((size_t)n_rows * n_heads, sizeof *out->keep)) != NULL;
    for (size_t i = 0; i < 4; i++) ok &= (*numbers[i] = calloc(n_rows, sizeof **numbers[i])) != NULL;
    out->saturated = calloc(n_rows, 1);
    out->proved = calloc(n_rows, 1);
    if (ok && out->saturated && out->proved) return KVB_OK;
    constrained_rows_free(out);
    return kvb_fail(err, KVB_MEMORY, "constraints: not enough memory for %u heads at %u ratios", n_heads, n_rows);
}

static kvb_status check_ratios(const double *ratios, uint32_t n_rows, kvb_error *err)
{
    for (uint32_t i = 0; i < n_rows; i++)
        if (!(ratios[i] >= 0 && ratios[i] <= 1) || (i > 0 && ratios[i] < ratios[i - 1]))
            return kvb_fail(err, KVB_ARGUMENT, "solver: ratio %u: expected ascending prune ratios in [0, 1], found %g",
                            i, ratios[i]);
    return KVB_OK;
}

kvb_status constrained_solve(constrained_rows *out, const loss_curves *curves, const kvb_limits *limits,
                             const double *ratios, uint32_t n_rows, bool exact, kvb_error *err)
{
    solving s = {.n_rows = n_rows, .ratios = ratios};
    *out = (constrained_rows){0};
    kvb_status status = check_ratios(ratios, n_rows, err);
    if (status == KVB_OK) status = constrained_instance_make(&s.x, limits, curves, err);
    if (status == KVB_OK) status = solving_make_budgets(&s, err);
    if (status == KVB_OK) status = rows_init(out, n_rows, shape_heads(&curves->shape), err);
    if (status == KVB_OK) {
        if (s.levels) solving_level_rows(&s);
        else status = solving_sweep_rows(&s, err);
    }
    if (status == KVB_OK) {
        for (uint32_t row = 0; row < n_rows; row++) out->greedy[row] = row_loss(&s, row);
        if (exact) status = solve_exactly(&s, out->proved, &out->work, err);
    }
    if (status == KVB_OK) {
        for (uint32_t row = 0; row < n_rows; row++) out->loss[row] = row_loss(&s, row);
        close_bounds(&s, out);
        close_keep(&s, out);
        memcpy(out->saturated, s.saturated, n_rows);
    } else {
        constrained_rows_free(out);
    }
    solving_free(&s);
    return status;
}
