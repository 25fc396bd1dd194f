#include "study/shift.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <gsl/gsl_errno.h>
#include <gsl/gsl_roots.h>
#include <math.h>
#include <stdlib.h>

static const double FARTHEST = 64, NEAR = 1e-14; // on the axis: where searches begin, and where they end
enum { HALVINGS = 60 };

typedef struct shift_work {
    const shift_base *base;
    size_t n_heads;
    double *x;     // [R] the rows on the axis
    double *now;   // [N] the present row's shifts
    double *least; // [N] the share that a head kept in the row before, and may keep at most
    double *keep;  // [N]
    uint32_t ranks;
    gsl_root_fsolver *roots;
} shift_work;

// ---- A head ----

// Returns the share that head h keeps at x.
static double read_column(const shift_work *w, size_t h, double x)
{
    const shift_base *b = w->base;
    uint32_t low = 0, high = b->n_rows; // rows below `low` are at or before x
    if (x <= SHIFT_AXIS_BEGIN) return 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (w->x[middle] <= x) low = middle + 1;
        else high = middle;
    }
    if (low == b->n_rows) return 1 - b->prune[(size_t)(low - 1) * w->n_heads + h];
    double above = 1 - b->prune[low * w->n_heads + h],
           below = low ? 1 - b->prune[(size_t)(low - 1) * w->n_heads + h] : 1,
           from = low ? w->x[low - 1] : SHIFT_AXIS_BEGIN;
    return below + (above - below) * (x - from) / (w->x[low] - from);
}

static double keep_at(const shift_work *w, size_t h, double u)
{
    return fmin(w->least[h], read_column(w, h, u + w->now[h]));
}

// ---- Heads that share a total ----

// The heads of one rank in one layer: first .. first + n - 1.
typedef struct shift_part {
    size_t first, n;
    double cap; // most that they keep together, in heads
} shift_part;

static shift_part part_of(const shift_work *w, uint32_t layer, uint32_t rank)
{
    const shift_base *b = w->base;
    size_t n = b->n_kv_heads / w->ranks;
    return (shift_part){(size_t)layer * b->n_kv_heads + rank * n, n, b->limits ? b->limits->cap[layer] * (double)n : n};
}

static double part_total(const shift_work *w, shift_part p, double u)
{
    double sum = 0;
    for (size_t h = p.first; h < p.first + p.n; h++) sum += keep_at(w, h, u);
    return sum;
}

// Layers first .. last - 1 of one rank, which share a total.
typedef struct shift_group {
    const shift_work *w;
    uint32_t first, last, rank;
    double target;
} shift_group;

// Returns by how much the heads keep more than the target at u, in heads; falls with u.
static double excess(double u, void *context)
{
    const shift_group *g = context;
    double sum = -g->target;
    for (uint32_t l = g->first; l < g->last; l++) {
        shift_part p = part_of(g->w, l, g->rank);
        sum += fmin(p.cap, part_total(g->w, p, u));
    }
    return sum;
}

// Finds the u at which the target is met, or the nearest end: all heads keep most at the lower end, least at the upper.
static double solve_group(shift_group *g, uint32_t row)
{
    gsl_function f = {excess, g};
    gsl_root_fsolver *roots = g->w->roots;
    double around = g->w->x[row], low = around - 1, high = around + 1; // without shifts u is in the middle
    while (low > -FARTHEST && excess(low, g) <= 0) low -= FARTHEST / 2;
    while (high < FARTHEST && excess(high, g) >= 0) high += FARTHEST / 2;
    if (low <= -FARTHEST) return low;
    if (high >= FARTHEST) return high;
    gsl_root_fsolver_set(roots, &f, low, high);
    for (int i = 0; i < 2 * HALVINGS; i++) { // Brent's method: about a dozen
        if (gsl_root_fsolver_iterate(roots) != GSL_SUCCESS) break;
        if (gsl_root_fsolver_x_upper(roots) - gsl_root_fsolver_x_lower(roots) < NEAR) break;
    }
    return gsl_root_fsolver_root(roots);
}

static void write_part(shift_work *w, shift_part p, double u)
{
    if (part_total(w, p, u) > p.cap) { // the part goes further up the axis by itself
        double low = u, high = FARTHEST;
        for (int i = 0; i < HALVINGS; i++) {
            double middle = (low + high) / 2;
            if (part_total(w, p, middle) > p.cap) low = middle;
            else high = middle;
        }
        u = high;
    }
    for (size_t h = p.first; h < p.first + p.n; h++) w->keep[h] = keep_at(w, h, u);
}

static void fill_group(shift_work *w, uint32_t row, uint32_t first, uint32_t last, uint32_t rank)
{
    const double *prune = w->base->prune + (size_t)row * w->n_heads;
    shift_group g = {w, first, last, rank, 0};
    for (uint32_t l = first; l < last; l++) {
        shift_part p = part_of(w, l, rank);
        for (size_t h = p.first; h < p.first + p.n; h++) g.target += 1 - prune[h];
    }
    double u = solve_group(&g, row);
    for (uint32_t l = first; l < last; l++) write_part(w, part_of(w, l, rank), u);
}

// ---- Rows ----

// Fills w->now with the shifts at x. Returns whether any is not 0.
static bool interpolate(shift_work *w, const double *knots, uint32_t n_knots, const double *shift, double x)
{
    uint32_t k = 0;
    bool any = false;
    while (k < n_knots && shift_axis(knots[k]) <= x) k++;
    uint32_t above = k < n_knots ? k : n_knots - 1, below = k ? k - 1 : 0;
    double from = shift_axis(knots[below]), to = shift_axis(knots[above]),
           part = above > below ? (x - from) / (to - from) : 0;
    for (size_t h = 0; h < w->n_heads; h++) {
        w->now[h] = (1 - part) * shift[below * w->n_heads + h] + part * shift[above * w->n_heads + h];
        any |= w->now[h] != 0;
    }
    return any;
}

static void fill_row(shift_work *w, uint32_t row, bool shifted, double *out)
{
    const shift_base *b = w->base;
    for (uint32_t rank = 0; rank < w->ranks && shifted; rank++)
        for (uint32_t l = 0; l < b->n_layers; l += b->by_layer ? 1 : b->n_layers)
            fill_group(w, row, l, b->by_layer ? l + 1 : b->n_layers, rank);
    const double *prune = b->prune + (size_t)row * w->n_heads;
    for (size_t h = 0; h < w->n_heads; h++) {
        out[h] = shifted ? fmin(1, fmax(0, 1 - w->keep[h])) : prune[h];
        w->least[h] = 1 - out[h];
    }
}

static kvb_status check_shifts(const shift_base *b, const double *knots, uint32_t n_knots, const double *shift,
                               kvb_error *err)
{
    size_t n = (size_t)b->n_layers * b->n_kv_heads;
    uint32_t ranks = b->limits ? b->limits->ranks : 1;
    if (b->n_rows == 0 || n_knots == 0 || ranks == 0 || b->n_kv_heads % ranks != 0)
        return kvb_fail(err, KVB_ARGUMENT, "shift: %u rows, %u knots, %u KV heads on %u ranks", b->n_rows, n_knots,
                        b->n_kv_heads, ranks);
    for (uint32_t k = 0; k < n_knots; k++)
        if (!(knots[k] > 0 && knots[k] < 1) || (k && knots[k] <= knots[k - 1]))
            return kvb_fail(err, KVB_ARGUMENT, "shift: ratio %g, expected ascending ones between 0 and 1", knots[k]);
    for (size_t i = 0; i < n_knots * n; i++)
        if (!isfinite(shift[i]) || fabs(shift[i]) > 32)
            return kvb_fail(err, KVB_NUMERIC, "shift: %g for head %zu, expected -32 to 32", shift[i], i % n);
    return KVB_OK;
}

kvb_status shift_table(const shift_base *base, const double *knots, uint32_t n_knots, const double *shift, double *out,
                       kvb_error *err)
{
    size_t n = (size_t)base->n_layers * base->n_kv_heads;
    kvb_status status = check_shifts(base, knots, n_knots, shift, err);
    if (status != KVB_OK) return status;
    double *memory = need(base->n_rows + 3 * n, sizeof *memory, "shares of heads");
    gsl_root_fsolver *roots = needed(gsl_root_fsolver_alloc(gsl_root_fsolver_brent), "solvers");
    shift_work w = {base,
                    n,
                    memory,
                    memory + base->n_rows,
                    memory + base->n_rows + n,
                    memory + base->n_rows + 2 * n,
                    base->limits ? base->limits->ranks : 1,
                    roots};
    bool shifted = false; // once a row is shifted, so are all that follow: they must stay below it
    for (uint32_t r = 0; r < base->n_rows; r++) w.x[r] = shift_axis(base->ratio[r]);
    for (size_t h = 0; h < n; h++) w.least[h] = 1;
    for (uint32_t r = 0; r < base->n_rows; r++) {
        shifted = interpolate(&w, knots, n_knots, shift, w.x[r]) || shifted;
        fill_row(&w, r, shifted, out + r * n);
    }
    gsl_root_fsolver_free(roots);
    free(memory);
    return KVB_OK;
}
