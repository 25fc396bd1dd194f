#include "solver/checker.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/wide.h"
#include <math.h>
#include <stdlib.h>

// The least of loss[i] + price i over i = 0 .. n, and the first i where it is. The least is first found chunk by chunk,
// without branches, and its place is looked up afterwards.
WIDE static double least_priced(const double *loss, uint32_t n, double price, uint32_t *at)
{
    enum { LANES = 8, CHUNK = 64 * LANES };
    double best = INFINITY;
    uint32_t where = 0, first = 0;
    for (; first + CHUNK <= n + 1; first += CHUNK) {
        double lane[LANES], index[LANES];
        for (uint32_t k = 0; k < LANES; k++) {
            lane[k] = INFINITY;
            index[k] = first + k;
        }
        for (uint32_t i = first; i < first + CHUNK; i += LANES)
            for (uint32_t k = 0; k < LANES; k++) {
                double value = loss[i + k] + price * index[k];
                lane[k] = value < lane[k] ? value : lane[k];
                index[k] += LANES;
            }
        for (uint32_t k = 0; k < LANES; k++)
            if (lane[k] < best) {
                best = lane[k];
                where = first;
            }
    }
    for (uint32_t i = first; i <= n; i++) {
        double value = loss[i] + price * i;
        if (value < best) {
            best = value;
            where = i;
        }
    }
    while (loss[where] + price * where != best) where++;
    *at = where;
    return best;
}

// ---- A concave function and its largest value ----------------------------------------------------------------------

// A point of min over b of [loss + lambda b]: its value, and the tokens that the minimisers keep, a slope of it. For a
// budget B the dual is value - lambda B, so that all ratios share the points that one of them has looked at.
typedef struct point {
    double lambda, value;
    double kept;
} point;

typedef point priced_at(const void *of, double lambda);

typedef struct dual {
    priced_at *f;
    const void *of;
    double most, tolerance; // the largest price that matters, and how exactly maxima are found
    point known[256];       // by price, 0 and `most` among them
    size_t n;
} dual;

static point look_at(dual *d, double lambda)
{
    point p = d->f(d->of, lambda);
    size_t i = d->n;
    if (d->n == sizeof d->known / sizeof *d->known) return p; // not seen to happen, and costs only time
    for (; i > 0 && d->known[i - 1].lambda > lambda; i--) d->known[i] = d->known[i - 1];
    d->known[i] = p;
    d->n++;
    return p;
}

static void dual_begin(dual *d, priced_at *f, const void *of, double most, double tolerance)
{
    d->f = f;
    d->of = of;
    d->most = most;
    d->tolerance = tolerance;
    d->n = 0;
    look_at(d, 0);
    look_at(d, most);
}

// Narrows low .. high, from `near` by factors of 4: in the end *low keeps too many tokens and *high does not.
static void bracket(dual *d, double budget, double near, point *low, point *high)
{
    double next = near;
    bool up = false, down = false;
    for (int step = 0; step < 64 && next > low->lambda && next < high->lambda && !(up && down); step++) {
        point p = look_at(d, next);
        if (p.kept > budget) {
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

// Returns the largest value over 0 .. most, or less by at most the tolerance; *lambda is where it lies.
static double climb(dual *d, double budget, double near, double *lambda)
{
    size_t i = 0;
    while (i + 1 < d->n && d->known[i].kept > budget) i++;
    point high = d->known[i], low = i ? d->known[i - 1] : high;
    if (i && d->n == 2) bracket(d, budget, near, &low, &high);
    double under = low.value - low.lambda * budget, over = high.value - high.lambda * budget;
    double best = under > over ? under : over;
    *lambda = under > over ? low.lambda : high.lambda;
    for (int step = 0; step < 500 && low.kept > budget; step++) {
        // Where the tangents meet is above the maximum.
        double far = high.lambda - low.lambda, rise = low.kept - budget, fall = budget - high.kept;
        double right = (over - under + fall * far) / (rise + fall);
        if (!(right > 0 && right < far) || under + rise * right - best <= d->tolerance) break;
        point p = look_at(d, low.lambda + right);
        double value = p.value - p.lambda * budget;
        if (value > best) {
            best = value;
            *lambda = p.lambda;
        }
        if (p.kept > budget) {
            low = p;
            under = value;
        } else {
            high = p;
            over = value;
        }
        if (p.kept == budget) break; // the minimisers meet the budget: p is the optimum, and the maximum
    }
    return best;
}

// How much the heads first .. first + n - 1 can lose at most; this bounds the prices and the rounding errors.
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

// ---- Without constraints -------------------------------------------------------------------------------------------

typedef struct plain_group {
    const loss_curves *c;
    uint32_t first, n;
} plain_group;

// Tokens are counted from the floor, so that products with prices stay small.
static point plain_at(const void *of, double lambda)
{
    const plain_group *g = of;
    const cache_shape *s = &g->c->shape;
    uint32_t begin = g->c->floor - shape_protected(s), middle = shape_middle(s), at;
    point p = {.lambda = lambda};
    for (uint32_t h = g->first; h < g->first + g->n; h++) {
        p.value += least_priced(g->c->loss + (size_t)h * (middle + 1) + begin, middle - begin, lambda, &at);
        p.kept += at;
    }
    return p;
}

// Tokens that a group of layers keeps in all at a prune ratio, but no less than the floors.
static uint64_t budget_of(const loss_curves *c, uint32_t n_layers, double ratio)
{
    const cache_shape *s = &c->shape;
    uint64_t heads = (uint64_t)n_layers * s->n_kv_heads;
    // Multiplied in this order, as tables are defined: half a token is common, and rounding decides it.
    uint64_t left = heads * s->n_tokens - (uint64_t)rint(ratio * n_layers * s->n_kv_heads * s->n_tokens);
    return left > heads * c->floor ? left : heads * c->floor;
}

// So many rows share their points; other rows may run on other threads.
enum { TOGETHER = 16 };

void checker_rows(const loss_curves *c, bool layers, uint32_t n_rows, const double *ratios, const double *lambda,
                  double *bound)
{
    uint32_t groups = layers ? c->shape.n_layers : 1, n = shape_heads(&c->shape) / groups;
#pragma omp parallel for schedule(dynamic)
    for (uint32_t begin = 0; begin < n_rows; begin += TOGETHER) {
        uint32_t end = n_rows - begin < TOGETHER ? n_rows : begin + TOGETHER;
        for (uint32_t r = begin; r < end; r++) bound[r] = 0;
        for (uint32_t k = 0; k < groups; k++) {
            plain_group g = {c, k * n, n};
            dual d;
            double where, most, tolerance;
            find_scale(c, g.first, n, &most, &tolerance);
            dual_begin(&d, plain_at, &g, most, tolerance); // at a price above the largest loss all are at the floor
            for (uint32_t r = begin; r < end; r++) {
                uint64_t budget = budget_of(c, c->shape.n_layers / groups, ratios[r]);
                bound[r] += climb(&d, (double)budget - (double)n * c->floor, lambda ? lambda[r] : 0, &where);
            }
        }
    }
}

// ---- With formats, in bytes ----------------------------------------------------------------------------------------

enum { SIDES = 2, GROUP_NUMBERS = 32, GROUP_SHARED = 4 }; // formats/README.md

// Bytes of `lines` lines of n numbers each, in groups that share a least number and a step; bf16 shares nothing.
static double stored_bytes(uint32_t packing, uint32_t lines, uint32_t n)
{
    uint32_t bits = 16u >> packing, rest = n % GROUP_NUMBERS;
    if (packing == KVB_PACK_BF16) return 2.0 * lines * n;
    double group = GROUP_SHARED + GROUP_NUMBERS / 8 * bits, last = GROUP_SHARED + (double)((rest * bits + 7) / 8);
    return lines * (n / GROUP_NUMBERS * group + (rest ? last : 0));
}

static double side_bytes(const checker_formats *f, uint32_t side, uint32_t packing, uint32_t keep)
{
    return side == KVB_KEYS ? stored_bytes(packing, f->head_dim, keep) : stored_bytes(packing, keep, f->head_dim);
}

static double side_loss(const checker_formats *f, size_t head, uint32_t side, uint32_t packing)
{
    enum { INTEGERS = KVB_PACKINGS - 1 };
    return packing == KVB_PACK_BF16 ? 0 : f->loss[(head * SIDES + side) * INTEGERS + packing - 1];
}

// The least of loss + lambda bytes: for each number of tokens, keys and values choose by themselves.
static double least_stored(const checker_formats *f, const double *bytes, uint32_t head, double lambda)
{
    const loss_curves *c = f->curves;
    uint32_t T = c->shape.n_tokens;
    double least = INFINITY;
    for (uint32_t b = c->floor; b <= T; b++) {
        double sum = loss_at(c, head, b);
        for (uint32_t side = 0; side < SIDES; side++) {
            double own = INFINITY;
            for (uint32_t p = 0; p < KVB_PACKINGS; p++)
                if (f->choices >> p & 1)
                    own = fmin(own, side_loss(f, head, side, p) +
                                        lambda * bytes[((size_t)side * KVB_PACKINGS + p) * (T + 1) + b]);
            sum += own;
        }
        least = fmin(least, sum);
    }
    return least;
}

// Returns a row's bytes, infinite if a format was not among the choices, and fills in the row's losses.
static double row_bytes(const checker_formats *f, const uint32_t *keep, const uint8_t *formats, checked_row *out)
{
    double sum = 0;
    for (uint32_t n = 0; n < shape_heads(&f->curves->shape); n++) out->loss += loss_at(f->curves, n, keep[n]);
    for (uint32_t i = 0; i < SIDES * shape_heads(&f->curves->shape); i++) {
        if (!(f->choices >> formats[i] & 1)) return INFINITY;
        sum += side_bytes(f, i % SIDES, formats[i], keep[i / SIDES]);
        out->added += side_loss(f, i / SIDES, i % SIDES, formats[i]);
    }
    out->loss += out->added;
    return sum;
}

// The bytes that are left of a full bf16 cache at this ratio, or more if the heads' floors take more.
static double allowed_bytes(const checker_formats *f, double ratio, double *budget)
{
    const cache_shape *s = &f->curves->shape;
    double least = 0;
    for (uint32_t side = 0; side < SIDES; side++) {
        double own = INFINITY;
        for (uint32_t p = 0; p < KVB_PACKINGS; p++)
            if (f->choices >> p & 1) own = fmin(own, side_bytes(f, side, p, f->curves->floor));
        least += own * shape_heads(s);
    }
    *budget = floor((1 - ratio) * 4.0 * s->n_tokens * f->head_dim * shape_heads(s) + 1e-6);
    return fmax(*budget, least);
}

void checker_formats_rows(const checker_formats *f, uint32_t n_rows, const double *ratios, const double *lambda,
                          const uint32_t *keep, const uint8_t *formats, checked_row *out)
{
    uint32_t T = f->curves->shape.n_tokens, N = shape_heads(&f->curves->shape);
    double *bytes = need((size_t)SIDES * KVB_PACKINGS * (T + 1), sizeof *bytes, "bytes of formats");
    for (uint32_t i = 0; i < SIDES * KVB_PACKINGS; i++)
        for (uint32_t b = 0; b <= T; b++)
            bytes[(size_t)i * (T + 1) + b] = side_bytes(f, i / KVB_PACKINGS, i % KVB_PACKINGS, b);
#pragma omp parallel for schedule(dynamic)
    for (uint32_t r = 0; r < n_rows; r++) {
        double budget, allowed = allowed_bytes(f, ratios[r], &budget);
        out[r] = (checked_row){.bound = -lambda[r] * budget};
        for (uint32_t n = 0; n < N; n++) out[r].bound += least_stored(f, bytes, n, lambda[r]);
        out[r].fits = row_bytes(f, keep + (size_t)r * N, formats + (size_t)r * N * SIDES, &out[r]) <= allowed;
    }
    free(bytes);
}

// ---- Under constraints ---------------------------------------------------------------------------------------------

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

// Splits the heads in `left` into at most `clusters` clusters; `set` has each set's cost, `memo` the known answers.
static priced price_partition(const priced *set, priced (*memo)[MOST_HEADS + 1], uint32_t left, uint32_t clusters)
{
    if (left == 0) return (priced){0, 0};
    if (clusters == 0) return (priced){INFINITY, 0};
    priced *known = &memo[left][clusters];
    if (known->value >= 0) return *known;
    priced best = {INFINITY, 0};
    for (uint32_t own = left; own > 0; own = (own - 1) & left) {
        if (!(own & (left & -left))) continue; // the cluster must have the lowest head
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
} limited_group;

static point limited_at(const void *of, double lambda)
{
    const limited_group *g = of;
    point p = {.lambda = lambda};
    for (uint32_t part = g->first; part < g->first + g->n; part++) {
        double cap = (double)g->x->cap[part], price = g->cap_price ? fmax(lambda, g->cap_price[part]) : lambda;
        priced own = price_part(g->x, part, price);
        p.value += own.value - (price - lambda) * cap;
        p.kept += price > lambda ? cap : (double)own.kept;
    }
    return p;
}

// A common price must outweigh what any number of heads can lose together.
static void limited_begin(dual *d, const limited_group *g)
{
    const constrained_instance *x = g->x;
    double most, tolerance;
    find_scale(&x->curves, g->first * x->own, g->n * x->own, &most, &tolerance);
    dual_begin(d, limited_at, g, most * x->own, tolerance);
}

// Finds the prices at which parts meet their caps, and the least and the most that groups keep.
static void find_caps(const constrained_instance *x, double *cap_price, uint64_t *least, uint64_t *most)
{
    for (uint32_t part = 0; part < x->n_groups * x->parts; part++) {
        limited_group g = {x, NULL, part, 1};
        dual d;
        uint64_t all = 0;
        for (uint32_t h = part * x->own; h < (part + 1) * x->own; h++) all += x->most[h];
        limited_begin(&d, &g);
        climb(&d, (double)x->cap[part], 0, &cap_price[part]);
        least[part / x->parts] += price_part(x, part, d.most).kept;
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
    double *cap_price = need((size_t)x.n_groups * x.parts, sizeof *cap_price, "parts");
    uint64_t *totals = need(2 * (size_t)x.n_groups, sizeof *totals, "groups");
    if (limits->levels && x.own > MOST_HEADS)
        status = kvb_fail(err, KVB_UNSUPPORTED,
                          "checker: numbers of different budgets are checked for at most %d heads", MOST_HEADS);
    if (status == KVB_OK) find_caps(&x, cap_price, totals, totals + x.n_groups);
#pragma omp parallel for schedule(dynamic) if (status == KVB_OK)
    for (uint32_t begin = 0; begin < n_rows; begin += TOGETHER) {
        uint32_t end = n_rows - begin < TOGETHER ? n_rows : begin + TOGETHER;
        for (uint32_t r = begin; r < end; r++) bound[r] = 0;
        for (uint32_t k = 0; k < x.n_groups && status == KVB_OK; k++) {
            limited_group g = {&x, cap_price, k * x.parts, x.parts};
            dual d;
            double where;
            limited_begin(&d, &g);
            for (uint32_t r = begin; r < end; r++)
                bound[r] += climb(&d, (double)rank_budget(&x, totals, ratios[r], k),
                                  lambda ? lambda[r] * limits->block : 0, &where);
        }
    }
    free_all(cap_price, totals);
    constrained_instance_free(&x);
    return status;
}
