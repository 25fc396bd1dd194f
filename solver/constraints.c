#include "solver/constraints.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

void constrained_instance_free(constrained_instance *x)
{
    loss_curves_free(&x->curves);
    free_all(x->origin, x->least, x->most, x->cap);
    *x = (constrained_instance){0};
}

double instance_loss(const constrained_instance *x, uint32_t first, uint32_t n, const uint32_t *keep)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += instance_curve(x, first + i)[keep[i]];
    return sum;
}

static void order_heads(constrained_instance *x)
{
    const kvb_limits *m = x->limits;
    uint32_t at = 0;
    for (uint32_t group = 0; group < x->n_groups; group++)
        for (uint32_t part = 0; part < x->parts; part++) {
            uint32_t layer = m->by_layer ? group / m->ranks : part, rank = group % m->ranks;
            x->cap[group * x->parts + part] = kvb_limits_cap(m, layer, x->shape.n_tokens);
            for (uint32_t i = 0; i < x->own; i++) x->origin[at++] = layer * m->n_kv_heads + rank * x->own + i;
        }
}

// Curves at whole pages; the last page may be only partly filled.
static void read_pages(constrained_instance *x, const loss_curves *curves)
{
    uint32_t units = x->curves.shape.n_tokens, block = x->limits->block;
    size_t n = shape_heads(&x->curves.shape);
#pragma omp parallel for schedule(static) if (n * units > PARALLEL_CELLS)
    for (size_t h = 0; h < n; h++) {
        double *loss = x->curves.loss + h * (units + 1), *gain = x->curves.gain + h * units;
        for (uint32_t i = 0; i <= units; i++) {
            uint64_t tokens = (uint64_t)i * block;
            loss[i] = loss_at(curves, x->origin[h], tokens < x->shape.n_tokens ? (uint32_t)tokens : x->shape.n_tokens);
            if (i > 0) gain[i - 1] = loss[i - 1] - loss[i];
        }
    }
    x->curves.total = curves->total;
}

static kvb_status check_parts(const constrained_instance *x, kvb_error *err)
{
    const kvb_limits *m = x->limits;
    uint32_t tokens = x->shape.n_tokens;
    for (uint32_t part = 0; part < x->n_groups * x->parts; part++) {
        uint32_t layer = x->origin[part * x->own] / m->n_kv_heads;
        uint64_t least = 0;
        for (uint32_t h = part * x->own; h < (part + 1) * x->own; h++) {
            least += x->least[h];
            if (x->least[h] > x->most[h])
                return kvb_fail(
                    err, KVB_ARGUMENT,
                    "constraints: layer %u, KV head %u: of %u tokens, in pages of %u, it must keep at least "
                    "%u pages and at most %u",
                    layer, x->origin[h] % m->n_kv_heads, tokens, m->block, x->least[h], x->most[h]);
        }
        if (least > x->cap[part])
            return kvb_fail(err, KVB_ARGUMENT,
                            "constraints: layer %u: of %u tokens, in pages of %u, its %u heads must keep at least %llu "
                            "pages, but its cap is %llu",
                            layer, tokens, m->block, x->own, (unsigned long long)least,
                            (unsigned long long)x->cap[part]);
    }
    return KVB_OK;
}

kvb_status constrained_instance_make(constrained_instance *x, const kvb_limits *limits, const loss_curves *curves,
                                     kvb_error *err)
{
    const cache_shape *s = &curves->shape;
    *x = (constrained_instance){0};
    kvb_status status = kvb_limits_check(limits, err);
    if (status != KVB_OK) return status;
    if (limits->n_layers != s->n_layers || limits->n_kv_heads != s->n_kv_heads)
        return kvb_fail(err, KVB_ARGUMENT, "constraints: made for %u x %u heads, but the problem has %u x %u",
                        limits->n_layers, limits->n_kv_heads, s->n_layers, s->n_kv_heads);
    constrained_instance y = {.limits = limits, .shape = *s};
    y.own = s->n_kv_heads / limits->ranks;
    y.parts = limits->by_layer ? 1 : s->n_layers;
    y.n_groups = limits->ranks * (limits->by_layer ? s->n_layers : 1);
    uint32_t n = shape_heads(s), units = kvb_limits_units(limits, s->n_tokens);
    cache_shape pages = {y.n_groups * y.parts, y.own, units, 0, 0};
    y.curves = loss_curves_make(&pages);
    y.origin = need(n, sizeof *y.origin, "heads");
    y.least = need(n, sizeof *y.least, "heads");
    y.most = need(n, sizeof *y.most, "heads");
    y.cap = need((size_t)y.n_groups * y.parts, sizeof *y.cap, "parts");
    order_heads(&y);
    y.curves.floor = (curves->floor + limits->block - 1) / limits->block;
    for (uint32_t h = 0; h < n; h++) {
        uint32_t least = kvb_limits_least(limits, y.origin[h], s->n_tokens);
        y.least[h] = least > y.curves.floor ? least : y.curves.floor;
        y.most[h] = kvb_limits_most(limits, y.origin[h], s->n_tokens);
    }
    status = check_parts(&y, err);
    if (status != KVB_OK) {
        constrained_instance_free(&y);
        return status;
    }
    read_pages(&y, curves);
    *x = y;
    return KVB_OK;
}

void constrained_targets(const constrained_instance *x, double ratio, uint64_t *budget)
{
    const cache_shape *s = &x->shape;
    uint32_t layers = x->limits->by_layer ? 1 : s->n_layers;
    double all = (double)layers * s->n_kv_heads * s->n_tokens;
    uint64_t tokens = (uint64_t)floor(all - ratio * all + 1e-6); // 100 - 0.55 * 100 is to be 45
    for (uint32_t g = 0; g < x->n_groups; g++) budget[g] = tokens / x->limits->block / x->limits->ranks;
}

bool constrained_clamp(const constrained_instance *x, const uint64_t *least, const uint64_t *most, uint64_t *budget)
{
    bool raised = false;
    uint32_t ranks = x->limits->ranks; // groups whose totals must be equal are neighbours
    for (uint32_t g = 0; g < x->n_groups; g += ranks) {
        uint64_t low = 0, high = UINT64_MAX;
        for (uint32_t p = g; p < g + ranks; p++) {
            low = least[p] > low ? least[p] : low;
            high = most[p] < high ? most[p] : high;
        }
        for (uint32_t p = g; p < g + ranks; p++) {
            raised |= budget[p] < low;
            budget[p] = budget[p] < low ? low : budget[p] > high ? high : budget[p];
        }
    }
    return raised;
}

static int falling(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

// The least that n heads with limits v, descending, keep in at most k clusters, each at the highest of its limits.
static double clustered_sum(const double *v, uint32_t n, uint32_t k)
{
    if (n == 0) return 0;
    double best = v[0] * n;
    for (uint32_t i = 1; i < n && k > 1; i++) best = fmin(best, v[0] * i + clustered_sum(v + i, n - i, k - 1));
    return best;
}

// What one rank's heads of a layer must keep, in heads.
static double part_demand(const kvb_limits *m, uint32_t layer, uint32_t rank)
{
    enum { MOST_HEADS = 8 }; // with levels; more are refused when they are solved
    uint32_t own = m->n_kv_heads / m->ranks;
    const double *least = m->least + (size_t)layer * m->n_kv_heads + (size_t)rank * own;
    double sum = 0, sorted[MOST_HEADS];
    if (m->levels && own <= MOST_HEADS) {
        memcpy(sorted, least, own * sizeof *sorted);
        qsort(sorted, own, sizeof *sorted, falling);
        return clustered_sum(sorted, own, m->levels);
    }
    for (uint32_t i = 0; i < own; i++) sum += least[i];
    return sum;
}

double constrained_demand(const kvb_limits *m)
{
    double most = 0, own = m->n_kv_heads / m->ranks;
    for (uint32_t p = 0; p < m->ranks; p++) {
        double all = 0;
        for (uint32_t l = 0; l < m->n_layers; l++) {
            double one = part_demand(m, l, p);
            all += one / m->n_layers;
            if (m->by_layer) most = fmax(most, one / own);
        }
        most = fmax(most, all / own);
    }
    return most;
}

// ---- Judging --------------------------------------------------------------------------------------------------------

static kvb_status check_head(const kvb_limits *m, uint32_t n_tokens, size_t h, uint32_t keep, kvb_error *err)
{
    double least = m->least[h] * n_tokens, most = m->most[h] * n_tokens;
    if (keep < 1 || keep > n_tokens || (keep % m->block != 0 && keep != n_tokens))
        return kvb_fail(err, KVB_MISMATCH,
                        "layer %zu, KV head %zu: expected 1..%u tokens in pages of %u, or all, found %u",
                        h / m->n_kv_heads, h % m->n_kv_heads, n_tokens, m->block, keep);
    if (keep < least - 1e-5 || keep > most + 1e-5)
        return kvb_fail(err, KVB_MISMATCH, "layer %zu, KV head %zu: expected %g..%g tokens, found %u",
                        h / m->n_kv_heads, h % m->n_kv_heads, least, most, keep);
    return KVB_OK;
}

static kvb_status check_layer(const kvb_limits *m, uint32_t n_tokens, uint32_t layer, const uint32_t *keep,
                              kvb_error *err)
{
    uint32_t different = 0, own = m->n_kv_heads / m->ranks;
    for (uint32_t g = 0; g < m->n_kv_heads; g++) {
        bool seen = false;
        for (uint32_t k = 0; k < g; k++) seen |= keep[k] == keep[g];
        different += !seen;
    }
    if (m->levels && different > m->levels)
        return kvb_fail(err, KVB_MISMATCH, "layer %u: expected at most %u different budgets, found %u", layer,
                        m->levels, different);
    for (uint32_t p = 0; p < m->ranks; p++) {
        uint64_t pages = 0;
        for (uint32_t g = p * own; g < (p + 1) * own; g++) pages += (keep[g] + m->block - 1) / m->block;
        double cap = m->cap[layer] < 1 ? m->cap[layer] * own * n_tokens : (double)pages * m->block;
        if ((double)pages * m->block > cap + 1e-5)
            return kvb_fail(err, KVB_MISMATCH, "layer %u, rank %u: expected at most %g tokens, found %llu pages of %u",
                            layer, p, cap, (unsigned long long)pages, m->block);
    }
    return KVB_OK;
}

// Pages of one rank in the layers first .. last - 1.
static uint64_t rank_pages(const kvb_limits *m, uint32_t rank, uint32_t first, uint32_t last, const uint32_t *keep)
{
    uint32_t own = m->n_kv_heads / m->ranks;
    uint64_t pages = 0;
    for (uint32_t l = first; l < last; l++)
        for (uint32_t g = rank * own; g < (rank + 1) * own; g++)
            pages += (keep[(size_t)l * m->n_kv_heads + g] + m->block - 1) / m->block;
    return pages;
}

kvb_status constrained_check(const kvb_limits *m, uint32_t n_tokens, const uint32_t *keep, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t h = 0; h < (size_t)m->n_layers * m->n_kv_heads && status == KVB_OK; h++)
        status = check_head(m, n_tokens, h, keep[h], err);
    for (uint32_t l = 0; l < m->n_layers && status == KVB_OK; l++)
        status = check_layer(m, n_tokens, l, keep + (size_t)l * m->n_kv_heads, err);
    uint32_t step = m->by_layer ? 1 : m->n_layers;
    for (uint32_t l = 0; l < m->n_layers && status == KVB_OK; l += step)
        for (uint32_t p = 1; p < m->ranks; p++) {
            uint64_t first = rank_pages(m, 0, l, l + step, keep), other = rank_pages(m, p, l, l + step, keep);
            if (first != other)
                return kvb_fail(err, KVB_MISMATCH,
                                "layers %u..%u: rank 0 keeps %llu pages of %u, rank %u %llu: expected equal totals", l,
                                l + step - 1, (unsigned long long)first, m->block, p, (unsigned long long)other);
        }
    return status;
}
