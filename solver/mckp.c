#include "solver/mckp.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>

void mckp_free(mckp *m)
{
    free(m->value);
    free(m->choice);
    *m = (mckp){0};
}

static kvb_status check_size(uint32_t n_classes, uint32_t n_choices, const mckp_limits *limits, kvb_error *err)
{
    uint64_t max_work = limits && limits->max_work ? limits->max_work : MCKP_MAX_WORK;
    uint64_t max_bytes = limits && limits->max_bytes ? limits->max_bytes : MCKP_MAX_BYTES;
    if (n_classes == 0 || n_choices == 0)
        return kvb_fail(err, KVB_ARGUMENT, "exact DP: expected at least one head and one choice, found %u and %u",
                        n_classes, n_choices);
    if (n_choices > UINT16_MAX)
        return kvb_fail(err, KVB_UNSUPPORTED, "exact DP: expected at most %u choices per head, found %u; use the grid",
                        UINT16_MAX, n_choices);
    // 32-bit factors: doubles are exact enough for a limit and cannot overflow.
    double states = (double)n_classes * n_choices, work = states * states / 2;
    double bytes = states * (2 * sizeof(double) + (double)n_classes * sizeof(uint16_t));
    if (work > (double)max_work || bytes > (double)max_bytes)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "exact DP: %u heads x %u choices need %.2g steps and %.2g bytes; the limits are %.2g and %.2g: "
                        "use the grid, or "
                        "fewer heads or tokens",
                        n_classes, n_choices, work, bytes, (double)max_work, (double)max_bytes);
    return KVB_OK;
}

// F_n from F_{n-1}: `previous` has `reach` entries, `value` and `choice` reach + n_choices - 1.
static void relax(double *value, uint16_t *choice, const double *previous, size_t reach, const double *cost,
                  uint32_t n_choices)
{
    for (size_t x = 0; x < reach + n_choices - 1; x++) value[x] = INFINITY;
    for (uint32_t j = 0; j < n_choices; j++) {
        double *to = value + j;
        uint16_t *back = choice + j;
        for (size_t x = 0; x < reach; x++) {
            double candidate = previous[x] + cost[j];
            if (candidate < to[x]) { // strictly: the smallest choice wins
                to[x] = candidate;
                back[x] = (uint16_t)j;
            }
        }
    }
}

kvb_status mckp_solve(mckp *out, const double *cost, uint32_t n_classes, uint32_t n_choices, const mckp_limits *limits,
                      kvb_error *err)
{
    *out = (mckp){0};
    kvb_status status = check_size(n_classes, n_choices, limits, err);
    if (status) return status;
    for (size_t i = 0; i < (size_t)n_classes * n_choices; i++)
        if (!isfinite(cost[i]))
            return kvb_fail(err, KVB_NUMERIC, "exact DP: head %zu, choice %zu: expected a finite cost, found %g",
                            i / n_choices, i % n_choices, cost[i]);
    size_t states = (size_t)n_classes * (n_choices - 1) + 1;
    mckp m = {.n_classes = n_classes, .n_choices = n_choices, .step = 1, .n_states = states};
    m.value = malloc(states * sizeof *m.value);
    m.choice = malloc(n_classes * states * sizeof *m.choice);
    double *previous = malloc(states * sizeof *previous);
    if (!m.value || !m.choice || !previous) {
        mckp_free(&m);
        free(previous);
        return kvb_fail(err, KVB_MEMORY, "exact DP: not enough memory for %u heads of %u choices", n_classes,
                        n_choices);
    }
    m.value[0] = 0;
    for (uint32_t n = 0; n < n_classes; n++) {
        double *swap = previous;
        previous = m.value;
        m.value = swap;
        relax(m.value, m.choice + n * states, previous, (size_t)n * (n_choices - 1) + 1, cost + (size_t)n * n_choices,
              n_choices);
    }
    free(previous);
    *out = m;
    return KVB_OK;
}

// The instance with choices floor + i * step.
static kvb_status solve_curves(mckp *out, const loss_curves *c, uint32_t step, const mckp_limits *limits,
                               kvb_error *err)
{
    *out = (mckp){0};
    uint32_t n = shape_heads(&c->shape), choices = (c->shape.n_tokens - c->floor) / step + 1;
    kvb_status status = check_size(n, choices, limits, err);
    if (status) return status;
    double *cost = malloc((size_t)n * choices * sizeof *cost);
    if (!cost) return kvb_fail(err, KVB_MEMORY, "exact DP: not enough memory for %u heads of %u choices", n, choices);
    for (uint32_t h = 0; h < n; h++)
        for (uint32_t i = 0; i < choices; i++) cost[(size_t)h * choices + i] = loss_at(c, h, c->floor + i * step);
    status = mckp_solve(out, cost, n, choices, limits, err);
    free(cost);
    if (status) return status;
    out->base = c->floor;
    out->step = step;
    return KVB_OK;
}

kvb_status mckp_tokens(mckp *out, const loss_curves *c, const mckp_limits *limits, kvb_error *err)
{
    return solve_curves(out, c, 1, limits, err);
}

kvb_status mckp_grid(mckp *out, const loss_curves *c, const mckp_limits *limits, kvb_error *err)
{
    uint32_t step = c->shape.n_tokens / 100;
    return solve_curves(out, c, step ? step : 1, limits, err);
}

kvb_status mckp_budgets(const mckp *m, uint64_t budget, uint32_t *keep, double *loss, kvb_error *err)
{
    uint64_t least = (uint64_t)m->n_classes * m->base;
    if (budget < least)
        return kvb_fail(err, KVB_ARGUMENT,
                        "exact DP: expected a budget of at least %llu tokens (the floor), found %llu",
                        (unsigned long long)least, (unsigned long long)budget);
    uint64_t units = (budget - least) / m->step;
    if (units > m->n_states - 1) units = m->n_states - 1;
    // Costs that rise could make a smaller total cheaper; loss curves never do, so the whole budget is spent.
    if (loss) *loss = m->value[units];
    for (uint32_t n = m->n_classes; keep && n-- > 0;) {
        uint32_t j = m->choice[(size_t)n * m->n_states + units];
        keep[n] = m->base + j * m->step;
        units -= j;
    }
    return KVB_OK;
}
