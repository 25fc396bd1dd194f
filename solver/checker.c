#include "solver/checker.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>

double checker_dual(const loss_curves *c, uint32_t first, uint32_t n, double lambda, uint64_t budget, uint64_t *kept)
{
    uint32_t protect = shape_protected(&c->shape), middle = shape_middle(&c->shape), begin = c->floor - protect;
    double sum = 0;
    uint64_t tokens = 0;
    for (uint32_t h = first; h < first + n; h++) {
        const double *loss = c->loss + (size_t)h * (middle + 1);
        // Counted from the floor, so that the products stay small.
        double best = loss[begin];
        uint32_t at = begin;
        for (uint32_t i = begin + 1; i <= middle; i++) {
            double value = loss[i] + lambda * (i - begin);
            if (value < best) {
                best = value;
                at = i;
            }
        }
        sum += best;
        tokens += at + protect;
    }
    if (kept) *kept = tokens;
    return sum - lambda * ((double)budget - (double)n * c->floor);
}

// A point of a dual function: its value, and the tokens that the minimisers keep beyond the budget.
typedef struct point {
    double lambda, value, slope;
} point;

typedef point dual_at(const void *of, double lambda);

// Closes in from `near` by factors of 4 on two points that keep too many and not too many tokens; without `near` the ends
// of the axis are these points.
static void bracket(dual_at *f, const void *of, double near, point *low, point *high)
{
    double next = near;
    bool up = false, down = false;
    for (int step = 0; step < 64 && next > low->lambda && next < high->lambda && !(up && down); step++) {
        point p = f(of, next);
        if (p.slope > 0) {
            *low = p;
            up = true;
            next = p.lambda * 4;
        } else {
            *high = p;
            down = true;
            next = p.lambda / 4;
        }
    }
}

// The largest value over 0 .. most, or less by at most `tolerance`; *lambda: where.
static double climb(dual_at *f, const void *of, double near, double most, double tolerance, double *lambda)
{
    point low = f(of, 0), high = f(of, most), best = low;
    if (low.slope > 0) {
        bracket(f, of, near, &low, &high);
        best = low.value > high.value ? low : high;
        for (int step = 0; step < 500; step++) {
            double far = high.lambda - low.lambda;
            double right = (high.value - low.value - high.slope * far) / (low.slope - high.slope);
            if (!(right > 0 && right < far) || low.value + low.slope * right - best.value <= tolerance) break;
            point p = f(of, low.lambda + right);
            if (p.value > best.value) best = p;
            if (p.slope > 0) low = p;
            else high = p;
            if (p.slope == 0) break; // the minimisers meet the budget: p is the optimum, and the maximum
        }
    }
    if (lambda) *lambda = best.lambda;
    return best.value;
}

// What the heads first .. first + n - 1 of curves can lose bounds the prices and the rounding.
static void find_scale(const loss_curves *c, uint32_t first, uint32_t n, double *most, double *tolerance)
{
    *most = 1e-300;
    *tolerance = 0;
    for (uint32_t h = first; h < first + n; h++) {
        double loss = loss_at(c, h, c->floor);
        *most = fmax(*most, 2 * loss);
        *tolerance += 1e-13 * loss;
    }
}

typedef struct plain_group {
    const loss_curves *c;
    uint32_t first, n;
    uint64_t budget;
} plain_group;

static point plain_dual(const void *of, double lambda)
{
    const plain_group *g = of;
    uint64_t kept;
    point p = {.lambda = lambda};
    p.value = checker_dual(g->c, g->first, g->n, lambda, g->budget, &kept);
    p.slope = (double)kept - (double)g->budget;
    return p;
}

double checker_best(const loss_curves *c, uint32_t first, uint32_t n, uint64_t budget, double near, double *lambda)
{
    plain_group g = {c, first, n, budget};
    double most, tolerance; // at a price above the largest loss everybody is at the floor
    find_scale(c, first, n, &most, &tolerance);
    return climb(plain_dual, &g, near, most, tolerance, lambda);
}

uint64_t checker_budget(const loss_curves *c, uint32_t n_layers, double ratio)
{
    const cache_shape *s = &c->shape;
    uint64_t heads = (uint64_t)n_layers * s->n_kv_heads;
    // Multiplied in this order, as tables are defined: half a token is common, and rounding decides it.
    uint64_t left = heads * s->n_tokens - (uint64_t)rint(ratio * n_layers * s->n_kv_heads * s->n_tokens);
    return left > heads * c->floor ? left : heads * c->floor;
}

void checker_rows(const loss_curves *c, bool layers, uint32_t n_rows, const double *ratios, const double *lambda,
                  double *bound)
{
    uint32_t groups = layers ? c->shape.n_layers : 1, n = shape_heads(&c->shape) / groups;
#pragma omp parallel for schedule(dynamic)
    for (uint32_t r = 0; r < n_rows; r++) {
        uint64_t budget = checker_budget(c, c->shape.n_layers / groups, ratios[r]);
        bound[r] = 0;
        for (uint32_t g = 0; g < groups; g++)
            bound[r] += checker_best(c, g * n, n, budget, lambda ? lambda[r] : 0, NULL);
    }
}

// ---- Under constraints -----------------------------------------------------------------------------------------------

enum { SETS = 256, MOST_HEADS = 8 };

typedef struct priced {
    double value;
    uint64_t kept;
} priced;

// The least loss + price b at which the heads of `set`, counted from head `first`, all keep the same b.
static priced price_set(const constrained_instance *x, uint32_t first, uint32_t set, double price)
{
    uint32_t units = x->curves.shape.n_tokens;
    priced best = {INFINITY, 0};
    for (uint32_t b = 0; b <= units; b++) {
        double value = 0;
        uint64_t kept = 0;
        bool allowed = true;
        for (uint32_t i = 0; set >> i; i++) {
            uint32_t h = first + i;
            if (!(set >> i & 1)) continue;
            allowed &= b >= x->least[h] && b <= x->most[h];
            value += x->curves.loss[(size_t)h * (units + 1) + b] + price * b;
            kept += b;
        }
        if (allowed && value < best.value) best = (priced){value, kept};
    }
    return best;
}

// Heads in `left` in at most `clusters` clusters; `set` has what each set costs, `memo` [SETS][..] what is known.
static priced price_partition(const priced *set, priced (*memo)[MOST_HEADS + 1], uint32_t left, uint32_t clusters)
{
    if (left == 0) return (priced){0, 0};
    if (clusters == 0) return (priced){INFINITY, 0};
    priced *known = &memo[left][clusters];
    if (known->value >= 0) return *known;
    priced best = {INFINITY, 0};
    for (uint32_t own = left; own > 0; own = (own - 1) & left) {
        if (!(own & (left & -left))) continue; // the cluster of the lowest head
        priced rest = price_partition(set, memo, left ^ own, clusters - 1);
        priced sum = {set[own].value + rest.value, set[own].kept + rest.kept};
        if (sum.value < best.value || (sum.value == best.value && sum.kept < best.kept)) best = sum;
    }
    return *known = best;
}

static priced price_part(const constrained_instance *x, uint32_t part, double price)
{
    uint32_t first = part * x->own, levels = x->limits->levels;
    priced sum = {0, 0};
    if (levels == 0) {
        for (uint32_t i = 0; i < x->own; i++) {
            priced head = price_set(x, first + i, 1, price);
            sum.value += head.value;
            sum.kept += head.kept;
        }
        return sum;
    }
    priced set[SETS], memo[SETS][MOST_HEADS + 1];
    for (uint32_t s = 0; s < 1u << x->own; s++) {
        set[s] = s ? price_set(x, first, s, price) : (priced){0, 0};
        for (uint32_t k = 0; k <= MOST_HEADS; k++) memo[s][k].value = -1;
    }
    return price_partition(set, memo, (1u << x->own) - 1, levels < x->own ? levels : x->own);
}

typedef struct limited_group {
    const constrained_instance *x;
    const double *cap_price; // [all parts], or NULL: caps do not count
    uint32_t first, n;       // parts
    uint64_t budget;
} limited_group;

static point limited_dual(const void *of, double lambda)
{
    const limited_group *g = of;
    point p = {lambda, -lambda * (double)g->budget, -(double)g->budget};
    for (uint32_t part = g->first; part < g->first + g->n; part++) {
        double cap = (double)g->x->cap[part], price = g->cap_price ? fmax(lambda, g->cap_price[part]) : lambda;
        priced own = price_part(g->x, part, price);
        p.value += own.value - (price - lambda) * cap;
        p.slope += price > lambda ? cap : (double)own.kept;
    }
    return p;
}

// Prices at which parts meet their caps, and what groups keep at the least and at the most.
static void find_caps(const constrained_instance *x, double *cap_price, uint64_t *least, uint64_t *most)
{
    for (uint32_t part = 0; part < x->n_groups * x->parts; part++) {
        limited_group g = {x, NULL, part, 1, x->cap[part]};
        uint64_t all = 0;
        double high, tolerance;
        for (uint32_t h = part * x->own; h < (part + 1) * x->own; h++) all += x->most[h];
        find_scale(&x->curves, part * x->own, x->own, &high, &tolerance);
        // A common price must outweigh what any number of heads can lose together.
        high *= x->own;
        climb(limited_dual, &g, 0, high, tolerance, &cap_price[part]);
        least[part / x->parts] += price_part(x, part, high).kept;
        most[part / x->parts] += all < x->cap[part] ? all : x->cap[part];
    }
}

// Pages of group k at a ratio: an equal share of the whole pages that stay, within what all ranks can keep.
static uint64_t rank_budget(const constrained_instance *x, const uint64_t *totals, double ratio, uint32_t k)
{
    const cache_shape *s = &x->shape;
    uint32_t ranks = x->limits->ranks, layers = x->limits->by_layer ? 1 : s->n_layers;
    uint64_t tokens = (uint64_t)layers * s->n_kv_heads * s->n_tokens, low = 0, high = UINT64_MAX;
    tokens -= (uint64_t)ceil(ratio * (double)tokens - 1e-6);
    for (uint32_t other = k - k % ranks; other < k - k % ranks + ranks; other++) {
        if (totals[other] > low) low = totals[other];
        if (totals[x->n_groups + other] < high) high = totals[x->n_groups + other];
    }
    uint64_t budget = tokens / x->limits->block / ranks;
    return budget < low ? low : budget > high ? high : budget;
}

kvb_status checker_limited_rows(const loss_curves *c, const kvb_limits *limits, uint32_t n_rows, const double *ratios,
                                const double *lambda, double *bound, kvb_error *err)
{
    constrained_instance x;
    kvb_status status = constrained_instance_make(&x, limits, c, err);
    if (status != KVB_OK) return status;
    double *cap_price = calloc((size_t)x.n_groups * x.parts, sizeof *cap_price);
    uint64_t *totals = calloc(2 * (size_t)x.n_groups, sizeof *totals);
    if (!cap_price || !totals)
        status = kvb_fail(err, KVB_MEMORY, "checker: not enough memory for %u groups", x.n_groups);
    if (status == KVB_OK && limits->levels && x.own > MOST_HEADS)
        status = kvb_fail(err, KVB_UNSUPPORTED,
                          "checker: a number of budgets per layer is checked for at most %d heads", MOST_HEADS);
    if (status == KVB_OK) find_caps(&x, cap_price, totals, totals + x.n_groups);
#pragma omp parallel for schedule(dynamic) if (status == KVB_OK)
    for (uint32_t r = 0; r < n_rows; r++) {
        bound[r] = 0;
        for (uint32_t k = 0; k < x.n_groups && status == KVB_OK; k++) {
            uint64_t budget = rank_budget(&x, totals, ratios[r], k);
            limited_group g = {&x, cap_price, k * x.parts, x.parts, budget};
            double high, tolerance;
            find_scale(&x.curves, k * x.parts * x.own, x.parts * x.own, &high, &tolerance);
            bound[r] += climb(limited_dual, &g, lambda ? lambda[r] * limits->block : 0, high * x.own, tolerance, NULL);
        }
    }
    free(cap_price);
    free(totals);
    constrained_instance_free(&x);
    return status;
}
