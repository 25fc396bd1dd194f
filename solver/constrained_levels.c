// Constrained budgets with levels: one price for all parts of a group.
#include "runtime/fail.h"
#include "solver/solving.h"
#include <stdlib.h>
#include <string.h>

// A point of a concave dual function: its value at a price, and by how much the minimisers exceed the budget.
typedef struct dual_point {
    double price, value, excess;
} dual_point;

typedef dual_point dual_function(const void *of, double price);

// The maximum of the dual, by the tangents of two points with excess above 0 and at most 0, which close in on it. *out
// is the point with no excess; returns the highest point. high: a price at which nothing can be too much.
static dual_point maximise(dual_function *f, const void *of, double high, dual_point *out)
{
    dual_point low = f(of, 0), top;
    *out = low;
    if (low.excess <= 0) return low;
    top = f(of, high);
    dual_point best = low.value > top.value ? low : top;
    for (int step = 0; step < 200; step++) {
        double far = top.price - low.price;
        double right = (top.value - low.value - top.excess * far) / (low.excess - top.excess);
        if (!(right > 0 && right < far)) break;
        dual_point p = f(of, low.price + right);
        best = p.value > best.value ? p : best;
        if (p.excess > 0) low = p;
        else top = p;
        if (p.excess == 0) break;
    }
    // Rounding may have left the corner itself just to the right.
    dual_point corner = f(of, low.price + 1e-13 * low.price);
    if (corner.excess <= 0 && corner.price < top.price) top = corner;
    *out = top;
    return best;
}

typedef struct priced_part {
    const solving *s;
    uint32_t part;
    uint64_t cap;
} priced_part;

static dual_point price_part(const void *of, double price)
{
    const priced_part *p = of;
    level_answer a;
    level_part_price(&p->s->levels[p->part], price, &a);
    return (dual_point){price, a.value - price * (double)p->cap, (double)a.total - (double)p->cap};
}

typedef struct priced_group {
    const solving *s;
    uint32_t group;
    uint64_t budget;
} priced_group;

static dual_point price_group(const void *of, double price)
{
    const priced_group *g = of;
    const constrained_instance *x = &g->s->x;
    dual_point sum = {price, -price * (double)g->budget, -(double)g->budget};
    for (uint32_t part = g->group * x->parts; part < (g->group + 1) * x->parts; part++) {
        double own = g->s->price[part] > price ? g->s->price[part] : price;
        level_answer a;
        level_part_price(&g->s->levels[part], own, &a);
        // At the price of its cap a part keeps the cap, whatever its cheapest clusters say.
        uint64_t total = own > price ? x->cap[part] : a.total;
        sum.value += a.value - (own - price) * (double)x->cap[part];
        sum.excess += (double)total;
    }
    return sum;
}

// Above this price nobody keeps more than the least.
static double highest_price(const constrained_instance *x)
{
    double most = 0;
    for (uint32_t h = 0; h < shape_heads(&x->curves.shape); h++) most += instance_curve(x, h)[0];
    return 2 * most + 1e-300;
}

kvb_status solving_make_levels(solving *s, kvb_error *err)
{
    uint32_t parts = s->x.n_groups * s->x.parts;
    kvb_status status = KVB_OK;
    s->levels = calloc(parts, sizeof *s->levels);
    if (!s->levels) return kvb_fail(err, KVB_MEMORY, "constraints: not enough memory for %u layers", parts);
#pragma omp parallel for schedule(dynamic) if (solving_is_large(s))
    for (uint32_t i = 0; i < parts; i++) {
        kvb_error error;
        kvb_status own = level_part_make(&s->levels[i], &s->x, i, &error);
        if (own == KVB_OK) continue;
#pragma omp critical(constrained_levels)
        status = kvb_fail(err, own, "%s", error.message);
    }
    for (uint32_t i = 0; status == KVB_OK && i < parts; i++) {
        level_answer a;
        level_part_price(&s->levels[i], highest_price(&s->x), &a);
        if (a.total > s->x.cap[i])
            status =
                kvb_fail(err, KVB_ARGUMENT,
                         "constraints: layer %u: with %u budgets its heads keep at least %llu pages of %u, but its "
                         "cap is %llu",
                         s->x.origin[i * s->x.own] / s->x.limits->n_kv_heads, s->x.limits->levels,
                         (unsigned long long)a.total, s->x.limits->block, (unsigned long long)s->x.cap[i]);
        s->least[i / s->x.parts] += a.total;
    }
    return status;
}

// The part and cluster (all heads of a part that keep the same) whose raise saves most within `left` units.
static bool raise_best(const solving *s, uint32_t group, uint32_t *units, uint64_t *left)
{
    const constrained_instance *x = &s->x;
    double most = 0;
    uint32_t best = 0, from = 0, to = 0, heads = 0;
    for (uint32_t h = group * solving_group_heads(s); h < (group + 1) * solving_group_heads(s); h++) {
        uint32_t part = h / x->own, first = part * x->own, end = first + x->own, count = 0, high = UINT32_MAX;
        uint64_t room = x->cap[part] - solving_part_total(s, part, units);
        bool seen = false;
        for (uint32_t i = first; i < end; i++) {
            if (units[i] != units[h]) continue;
            seen |= i < h;
            count++;
            high = x->most[i] < high ? x->most[i] : high;
        }
        if (seen) continue; // its cluster has been looked at
        room = (room < *left ? room : *left) / count;
        if (high > units[h] + room) high = (uint32_t)(units[h] + room);
        for (uint32_t b = units[h] + 1; b <= high; b++) {
            double saved = 0;
            for (uint32_t i = first; i < end; i++)
                if (units[i] == units[h]) saved += instance_curve(x, i)[units[h]] - instance_curve(x, i)[b];
            if (!(saved > most)) continue;
            most = saved;
            best = first;
            from = units[h];
            to = b;
            heads = count;
        }
    }
    if (!(most > 0)) return false;
    for (uint32_t i = best; i < best + x->own; i++)
        if (units[i] == from) units[i] = to;
    *left -= (uint64_t)heads * (to - from);
    return true;
}

static void level_row(solving *s, uint32_t row, uint32_t group)
{
    const constrained_instance *x = &s->x;
    size_t at = (size_t)row * x->n_groups + group;
    priced_group g = {s, group, s->budget[at]};
    uint32_t *units = s->keep + (size_t)row * shape_heads(&x->curves.shape);
    dual_point p;
    s->lambda[at] = maximise(price_group, &g, highest_price(x), &p).price;
    uint64_t left = s->budget[at];
    for (uint32_t part = group * x->parts; part < (group + 1) * x->parts; part++) {
        level_answer a;
        level_part_price(&s->levels[part], p.price > s->price[part] ? p.price : s->price[part], &a);
        memcpy(units + (size_t)part * x->own, a.keep, x->own * sizeof *units);
        left -= a.total;
    }
    while (left > 0 && raise_best(s, group, units, &left)) {
    }
}

void solving_level_rows(solving *s)
{
    const constrained_instance *x = &s->x;
    for (uint32_t part = 0; part < x->n_groups * x->parts; part++) {
        priced_part of = {s, part, x->cap[part]};
        dual_point p;
        maximise(price_part, &of, highest_price(x), &p);
        s->price[part] = p.price;
    }
#pragma omp parallel for schedule(dynamic) collapse(2) if (solving_is_large(s) && s->n_rows > 1)
    for (uint32_t row = 0; row < s->n_rows; row++)
        for (uint32_t group = 0; group < x->n_groups; group++) level_row(s, row, group);
}
