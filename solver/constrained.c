#include "solver/constrained.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/layered.h"
#include "solver/radix.h"
#include <stdlib.h>
#include <string.h>

// Everything about one problem while it is being solved: make_budgets(), then level_rows() or sweep_rows() fill keep,
// lambda and price.
typedef struct solving {
    constrained_instance x;
    level_part *levels; // [groups * parts], or NULL
    uint32_t n_rows;
    const double *ratios;
    uint64_t *budget;       // [R, groups]
    uint32_t *keep;         // [R, N] units, in the instance's order
    double *lambda;         // [R, groups]
    double *price;          // [groups * parts] at which a part meets its cap; 0: it does by itself
    uint8_t *saturated;     // [R]
    uint64_t *least, *most; // [groups]
} solving;

// Whether threads are worth waking: each row looks at the curves of all heads, or each part at those of its own.
static bool is_large(const solving *s)
{
    return (size_t)shape_heads(&s->x.curves.shape) * s->x.curves.shape.n_tokens > PARALLEL_CELLS / 8;
}

static uint32_t group_heads(const solving *s)
{
    return s->x.parts * s->x.own;
}

// Returns the units that a part's heads keep together; units [N].
static uint64_t part_total(const solving *s, uint32_t part, const uint32_t *units)
{
    uint64_t sum = 0;
    for (uint32_t h = part * s->x.own; h < (part + 1) * s->x.own; h++) sum += units[h];
    return sum;
}

static void free_solving(solving *s)
{
    for (uint32_t i = 0; s->levels && i < s->x.n_groups * s->x.parts; i++) level_part_free(&s->levels[i]);
    free_all(s->levels, s->budget, s->keep, s->lambda, s->price, s->saturated, s->least, s->most);
    constrained_instance_free(&s->x);
}

// ---- Budgets of the groups ------------------------------------------------------------------------------------------

// Above this price nobody keeps more than the least.
static double highest_price(const constrained_instance *x)
{
    double most = 0;
    for (uint32_t h = 0; h < shape_heads(&x->curves.shape); h++) most += instance_curve(x, h)[0];
    return 2 * most + 1e-300;
}

static kvb_status make_levels(solving *s, kvb_error *err)
{
    uint32_t parts = s->x.n_groups * s->x.parts;
    kvb_status status = KVB_OK;
    s->levels = need(parts, sizeof *s->levels, "layers");
#pragma omp parallel for schedule(dynamic) if (is_large(s))
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

static kvb_status make_budgets(solving *s, kvb_error *err)
{
    const constrained_instance *x = &s->x;
    uint32_t n = shape_heads(&x->curves.shape);
    size_t cells = (size_t)s->n_rows * x->n_groups;
    s->budget = need(cells, sizeof *s->budget, "budgets");
    s->lambda = need(cells, sizeof *s->lambda, "multipliers");
    s->keep = need((size_t)s->n_rows * n, sizeof *s->keep, "budgets");
    s->price = need((size_t)x->n_groups * x->parts, sizeof *s->price, "multipliers");
    s->saturated = need(s->n_rows, 1, "ratios");
    s->least = need(x->n_groups, sizeof *s->least, "groups");
    s->most = need(x->n_groups, sizeof *s->most, "groups");
    for (uint32_t part = 0; part < x->n_groups * x->parts; part++) {
        uint64_t most = part_total(s, part, x->most);
        s->most[part / x->parts] += most < x->cap[part] ? most : x->cap[part];
        if (!x->limits->levels) s->least[part / x->parts] += part_total(s, part, x->least);
    }
    kvb_status status = x->limits->levels ? make_levels(s, err) : KVB_OK;
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

// ---- Greedily, with levels: one price for all parts of a group ------------------------------------------------------

// A point of a concave dual function: its value at a price, and by how much the minimisers exceed the budget.
typedef struct dual_point {
    double price, value, excess;
} dual_point;

typedef dual_point dual_function(const void *of, double price);

// Finds the maximum of the dual by the tangents of two points, with excess above 0 and at most 0, which close in on it.
// *out is the point without excess; returns the highest point. high: a price at which there is no excess.
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

// Raises the cluster (all heads of a part that keep the same) for which that saves most within `left` units.
static bool raise_best(const solving *s, uint32_t group, uint32_t *units, uint64_t *left)
{
    const constrained_instance *x = &s->x;
    double most = 0;
    uint32_t best = 0, from = 0, to = 0, heads = 0;
    for (uint32_t h = group * group_heads(s); h < (group + 1) * group_heads(s); h++) {
        uint32_t part = h / x->own, first = part * x->own, end = first + x->own, count = 0, high = UINT32_MAX;
        uint64_t room = x->cap[part] - part_total(s, part, units);
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

static void level_rows(solving *s)
{
    const constrained_instance *x = &s->x;
    for (uint32_t part = 0; part < x->n_groups * x->parts; part++) {
        priced_part of = {s, part, x->cap[part]};
        dual_point p;
        maximise(price_part, &of, highest_price(x), &p);
        s->price[part] = p.price;
    }
#pragma omp parallel for schedule(dynamic) collapse(2) if (is_large(s) && s->n_rows > 1)
    for (uint32_t row = 0; row < s->n_rows; row++)
        for (uint32_t group = 0; group < x->n_groups; group++) level_row(s, row, group);
}

// ---- Greedily, without levels: the hulls of the heads, cheapest blocks first ----------------------------------------

typedef struct sweep {
    keyed *segments, *scratch;
    hull_block *blocks;
    uint32_t *units; // [N] kept at this point of the sweep
    uint64_t *total; // [parts] of the group
} sweep;

// Blocks of the group's heads over least .. most, cheapest first; of equal slopes the lower head, and in it the last
// tokens first.
static size_t sort_blocks(const constrained_instance *x, sweep *w, uint32_t first, uint32_t n)
{
    size_t count = 0, units = x->curves.shape.n_tokens;
    for (uint32_t h = first; h < first + n; h++) {
        size_t blocks = pava_blocks(w->blocks, x->curves.gain + h * units + x->least[h], x->most[h] - x->least[h]);
        while (blocks-- > 0)
            w->segments[count++] = (keyed){key_from_double(w->blocks[blocks].slope), h, w->blocks[blocks].length};
    }
    radix_sort(w->segments, w->scratch, count, 64);
    return count;
}

static uint64_t drop(sweep *w, keyed *segment, uint64_t excess)
{
    uint32_t take = segment->b < excess ? segment->b : (uint32_t)excess;
    segment->b -= take;
    w->units[segment->a] -= take;
    return take;
}

static void sweep_group(solving *s, sweep *w, uint32_t group)
{
    const constrained_instance *x = &s->x;
    uint32_t n = group_heads(s), first = group * n, all = shape_heads(&x->curves.shape);
    size_t count = sort_blocks(x, w, first, n);
    uint64_t kept = 0;
    for (uint32_t h = first; h < first + n; h++) w->units[h] = x->most[h];
    for (uint32_t i = 0; i < x->parts; i++) w->total[i] = part_total(s, group * x->parts + i, w->units);
    for (size_t k = 0; k < count; k++) {
        uint32_t part = w->segments[k].a / x->own;
        uint64_t *total = &w->total[part - group * x->parts];
        if (*total <= x->cap[part] || w->segments[k].b == 0) continue;
        *total -= drop(w, &w->segments[k], *total - x->cap[part]);
        s->price[part] = double_from_key(w->segments[k].key);
    }
    for (uint32_t i = 0; i < x->parts; i++) kept += w->total[i];
    double lambda = 0;
    size_t k = 0;
    for (uint32_t row = 0; row < s->n_rows; row++) {
        size_t at = (size_t)row * x->n_groups + group;
        while (kept > s->budget[at] && k < count) {
            if (w->segments[k].b == 0) {
                k++;
                continue;
            }
            kept -= drop(w, &w->segments[k], kept - s->budget[at]);
            lambda = double_from_key(w->segments[k].key);
        }
        s->lambda[at] = lambda;
        memcpy(s->keep + (size_t)row * all + first, w->units + first, n * sizeof *w->units);
    }
}

static void sweep_rows(solving *s)
{
    const constrained_instance *x = &s->x;
    size_t units = x->curves.shape.n_tokens, cells = group_heads(s) * units;
    sweep w = {.segments = need_more(NULL, cells, sizeof *w.segments, "blocks of hulls"),
               .scratch = need_more(NULL, cells, sizeof *w.scratch, "blocks of hulls"),
               .blocks = need_more(NULL, units, sizeof *w.blocks, "blocks of hulls"),
               .units = need(shape_heads(&x->curves.shape), sizeof *w.units, "heads"),
               .total = need(x->parts, sizeof *w.total, "parts")};
    for (uint32_t group = 0; group < x->n_groups; group++) sweep_group(s, &w, group);
    free_all(w.segments, w.scratch, w.blocks, w.units, w.total);
}

// ---- Exactly --------------------------------------------------------------------------------------------------------

// Whether groups fall apart into heads that only share a budget.
static bool is_plain(const solving *s)
{
    bool plain = s->levels == NULL;
    for (uint32_t part = 0; part < s->x.n_groups * s->x.parts && plain; part++)
        plain = part_total(s, part, s->x.most) <= s->x.cap[part];
    return plain;
}

static void solve_group(const solving *s, core_work *core, layered_work *layered, uint32_t row, uint32_t group,
                        uint32_t *keep, core_answer *a)
{
    const constrained_instance *x = &s->x;
    uint32_t n = group_heads(s), first = group * n;
    size_t at = (size_t)row * x->n_groups + group;
    const uint32_t *start = s->keep + (size_t)row * shape_heads(&x->curves.shape) + first;
    if (core) {
        core_problem p = {&x->curves,     first,          n, x->least + first, x->most + first, start, s->lambda[at],
                          EXACT_MAX_WORK, EXACT_MAX_BYTES};
        core_solve(core, &p, keep, a);
        return;
    }
    layered_problem p = {
        x,     s->levels,      group,          s->budget[at], s->lambda[at], s->price + group * x->parts,
        start, EXACT_MAX_WORK, EXACT_MAX_BYTES};
    layered_solve(layered, &p, keep, a);
}

// Replaces greedy's budgets by the optimum. proved [R].
static void solve_exactly(solving *s, uint8_t *proved, uint64_t *work)
{
    uint32_t n = group_heads(s), jobs = s->n_rows * s->x.n_groups;
    bool plain = is_plain(s);
    memset(proved, 1, s->n_rows);
#pragma omp parallel if (jobs > 1 && is_large(s))
    {
        core_work *core = plain ? core_work_new() : NULL;
        layered_work *layered = plain ? NULL : layered_work_new();
        uint32_t *keep = need(n, sizeof *keep, "heads");
        uint64_t done = 0;
#pragma omp for schedule(dynamic)
        for (uint32_t i = 0; i < jobs; i++) {
            core_answer a;
            solve_group(s, core, layered, i / s->x.n_groups, i % s->x.n_groups, keep, &a);
            done += a.work;
            memcpy(s->keep + (size_t)i * n, keep, n * sizeof *keep);
#pragma omp atomic
            proved[i / s->x.n_groups] &= (uint8_t)a.proved;
        }
#pragma omp atomic
        *work += done;
        core_work_free(core);
        layered_work_free(layered);
        free(keep);
    }
}

// ---- Results --------------------------------------------------------------------------------------------------------

static void sum_losses(const solving *s, double *loss)
{
    uint32_t n = shape_heads(&s->x.curves.shape);
    for (uint32_t r = 0; r < s->n_rows; r++) loss[r] = instance_loss(&s->x, 0, n, s->keep + (size_t)r * n);
}

static void close_bounds(const solving *s, solved_rows *out)
{
    const constrained_instance *x = &s->x;
#pragma omp parallel for schedule(dynamic) if (is_large(s) && s->n_rows > 1)
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
static void close_keep(const solving *s, solved_rows *out)
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

kvb_status constrained_solve(solved_rows *out, const loss_curves *curves, const kvb_limits *limits,
                             const double *ratios, uint32_t n_rows, bool exact, kvb_error *err)
{
    solving s = {.n_rows = n_rows, .ratios = ratios};
    *out = (solved_rows){0};
    kvb_status status = prune_ratios_check(ratios, n_rows, err);
    if (status == KVB_OK) status = constrained_instance_make(&s.x, limits, curves, err);
    if (status == KVB_OK) status = make_budgets(&s, err);
    if (status == KVB_OK) {
        *out = solved_rows_make(n_rows, shape_heads(&curves->shape));
        if (s.levels) level_rows(&s);
        else sweep_rows(&s);
        sum_losses(&s, out->greedy);
        if (exact) solve_exactly(&s, out->proved, &out->work);
        sum_losses(&s, out->loss);
        close_bounds(&s, out);
        close_keep(&s, out);
        memcpy(out->saturated, s.saturated, n_rows);
    }
    free_solving(&s);
    return status;
}

// ---- What tables need: averages brought within limits, refusals, losses on other texts ------------------------------

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
    solved_rows rows;
    kvb_status status = constrained_solve(&rows, curves, limits, &ratio, 1, false, err);
    if (status != KVB_OK) return status;
    for (uint32_t h = 0; h < n; h++) prune_ratio[h] = 1 - (double)rows.keep[h] / tokens;
    *saturated |= rows.saturated[0];
    solved_rows_free(&rows);
    return KVB_OK;
}

kvb_status constrained_project(const kvb_limits *limits, const cache_shape *shape, uint32_t floor_tokens,
                               const double *ratios, uint32_t n_rows, double *prune_ratio, uint8_t *saturated,
                               kvb_error *err)
{
    const cache_shape bare = {shape->n_layers, shape->n_kv_heads, shape->n_tokens, 0, 0};
    loss_curves curves = loss_curves_make(&bare);
    kvb_status status = KVB_OK;
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
    if (status == KVB_OK) status = make_budgets(&s, err);
    for (uint32_t row = 0; row < n_rows && status == KVB_OK; row++) {
        const constrained_instance *x = &s.x;
        if (!s.saturated[row]) continue;
        uint64_t *budget = s.budget + (size_t)row * x->n_groups;
        constrained_targets(x, ratios[row], budget);
        for (uint32_t g = 0; g < x->n_groups && status == KVB_OK; g++)
            if (s.least[g] > budget[g])
                status =
                    kvb_fail(err, KVB_ARGUMENT,
                             "ratio %g: floors, pins and protected tokens demand at least %llu pages of %u tokens "
                             "of a context of %u, but the budget is %llu; lower them, or prune less than %.4f",
                             ratios[row], (unsigned long long)s.least[g], limits->block, x->shape.n_tokens,
                             (unsigned long long)budget[g],
                             1 - (double)s.least[g] * limits->block / ((double)group_heads(&s) * x->shape.n_tokens));
    }
    free_solving(&s);
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
