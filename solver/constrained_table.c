// What tables need of constrained problems: averages brought within limits, refusals, and losses on other texts.
#include "runtime/fail.h"
#include "solver/solving.h"

// One row's projection; curves is scratch.
static kvb_status project_row(const kvb_limits *limits, loss_curves *curves, double ratio, double *prune_ratio,
                              uint8_t *saturated, kvb_error *err)
{
    uint32_t n = shape_heads(&curves->shape), tokens = curves->shape.n_tokens;
    uint32_t last = (tokens - 1) / limits->block * limits->block; // tokens before the last page, which counts in full
    double slope = 2.0 * tokens, steep = slope * limits->block / (tokens - last);
    for (uint32_t h = 0; h < n; h++) {
        double ideal = (1 - prune_ratio[h]) * tokens, *gain = curves->gain + (size_t)h * tokens;
        for (uint32_t b = 1; b <= tokens; b++) gain[b - 1] = (b > last ? steep : slope) + 2 * (ideal - b) + 1;
    }
    loss_curves_sum(curves);
    constrained_rows rows;
    kvb_status status = constrained_solve(&rows, curves, limits, &ratio, 1, false, err);
    if (status != KVB_OK) return status;
    for (uint32_t h = 0; h < n; h++) prune_ratio[h] = 1 - (double)rows.keep[h] / tokens;
    *saturated |= rows.saturated[0];
    constrained_rows_free(&rows);
    return KVB_OK;
}

kvb_status constrained_project(const kvb_limits *limits, const cache_shape *shape, uint32_t floor_tokens,
                               const double *ratios, uint32_t n_rows, double *prune_ratio, uint8_t *saturated,
                               kvb_error *err)
{
    loss_curves curves;
    cache_shape bare = {shape->n_layers, shape->n_kv_heads, shape->n_tokens, 0, 0};
    kvb_status status = loss_curves_init(&curves, &bare, err);
    if (status != KVB_OK) return status;
    curves.floor = floor_tokens;
    for (uint32_t r = 0; r < n_rows && status == KVB_OK; r++)
        status =
            project_row(limits, &curves, ratios[r], prune_ratio + (size_t)r * shape_heads(shape), &saturated[r], err);
    loss_curves_free(&curves);
    return status;
}

kvb_status constrained_require(const loss_curves *curves, const kvb_limits *limits, const double *ratios,
                               uint32_t n_rows, kvb_error *err)
{
    solving s = {.n_rows = n_rows, .ratios = ratios};
    kvb_status status = constrained_instance_make(&s.x, limits, curves, err);
    if (status == KVB_OK) status = solving_make_budgets(&s, err);
    for (uint32_t row = 0; row < n_rows && status == KVB_OK; row++) {
        const constrained_instance *x = &s.x;
        if (!s.saturated[row]) continue;
        uint64_t *budget = s.budget + (size_t)row * x->n_groups;
        constrained_targets(x, ratios[row], budget);
        for (uint32_t g = 0; g < x->n_groups && status == KVB_OK; g++)
            if (s.least[g] > budget[g])
                status = kvb_fail(err, KVB_ARGUMENT,
                                  "ratio %g: floors, pins and protected tokens demand at least %llu pages of %u tokens "
                                  "of a context of %u, but the budget is %llu; lower them, or prune less than %.4f",
                                  ratios[row], (unsigned long long)s.least[g], limits->block, x->shape.n_tokens,
                                  (unsigned long long)budget[g],
                                  1 - (double)s.least[g] * limits->block /
                                          ((double)solving_group_heads(&s) * x->shape.n_tokens));
    }
    solving_free(&s);
    return status;
}

static double ideal_of_row(const void *self, size_t head, uint32_t n_tokens)
{
    return (1 - ((const double *)self)[head]) * n_tokens;
}

kvb_status constrained_loss_add(double *sum, const loss_curves *c, const kvb_limits *limits, uint32_t n_rows,
                                const double *prune_ratio, uint32_t *keep, kvb_error *err)
{
    uint32_t n = shape_heads(&c->shape);
    kvb_status status = KVB_OK;
    for (uint32_t r = 0; r < n_rows && status == KVB_OK && c->total > 0; r++) {
        double loss = 0;
        status = kvb_limits_round(limits, ideal_of_row, prune_ratio + (size_t)r * n, c->shape.n_tokens, 1, keep, err);
        for (uint32_t h = 0; status == KVB_OK && h < n; h++) loss += loss_at(c, h, keep[h]);
        sum[r] += loss / c->total;
    }
    return status;
}
