#include "study/measured.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/greedy.h"
#include <math.h>

enum { UNITS = 1024 };                 // a group's cache, for the solver
static const double AROUND = 1.5;      // levels go this far beyond the knots, on the axis of shift.h
static const double LEAST_LOSS = 1e-9; // nats, below which heads are not told apart
static const double MOST_MOVE = 3;     // the largest shift of a head; measurements say nothing about larger ones

uint32_t measured_levels(const double *knots, uint32_t n_knots, double *levels)
{
    uint32_t n = n_knots > 1 ? MEASURED_LEVELS_MAX : 4;
    double from = shift_axis(knots[0]) - AROUND, to = shift_axis(knots[n_knots - 1]) + AROUND;
    for (uint32_t i = 0; i < n; i++) levels[i] = 1 / (1 + exp(-(from + (to - from) * i / (n - 1))));
    return n;
}

// Groups of heads that move together, and what each keeps and loses along the base's rows. Row 0 is the whole cache.
typedef struct measured_work {
    const shift_base *base;
    uint32_t n_groups, per_group;
    double *x;     // [R + 1] rows on the axis
    double *share; // [groups, R + 1] of the group's cache that is kept
    double *loss;  // [groups, R + 1]
} measured_work;

// Returns one head's loss at x, interpolated and extrapolated exponentially on the axis from its losses at the levels,
// which are at[0], at[step] and so on, made non-decreasing.
static double loss_at_axis(const double *levels, uint32_t n, const double *at, size_t step, double x)
{
    double most[MEASURED_LEVELS_MAX] = {0}, top = LEAST_LOSS;
    for (uint32_t i = 0; i < n; i++) most[i] = log(top = fmax(top, at[i * step]));
    uint32_t i = 0;
    while (i + 2 < n && shift_axis(levels[i + 1]) < x) i++;
    double from = shift_axis(levels[i]), to = shift_axis(levels[i + 1]);
    return exp(most[i] + (most[i + 1] - most[i]) * (x - from) / (to - from));
}

static measured_work measured_work_open(const shift_base *base, uint32_t n_groups)
{
    size_t rows = base->n_rows + 1, n = (size_t)base->n_layers * base->n_kv_heads;
    double *memory = need(rows + 2 * n_groups * rows, sizeof *memory, "numbers of curves");
    uint32_t per_group = (uint32_t)(n / n_groups);
    measured_work w = {base, n_groups, per_group, memory, memory + rows, memory + rows + n_groups * rows};
    w.x[0] = SHIFT_AXIS_BEGIN;
    for (uint32_t r = 0; r < base->n_rows; r++) w.x[r + 1] = shift_axis(base->ratio[r]);
    for (size_t h = 0; h < n; h++) {
        double *share = w.share + h / per_group * rows, before = 1;
        share[0] += 1.0 / per_group;
        for (uint32_t r = 0; r < base->n_rows; r++) {
            before = fmin(before, 1 - base->prune[r * n + h]);
            share[r + 1] += before / per_group;
        }
    }
    return w;
}

// Adds up the losses of each group's heads. A head that still keeps everything loses nothing.
static void fill_losses(measured_work *w, const double *levels, uint32_t n_levels, const double *loss)
{
    const shift_base *b = w->base;
    size_t rows = b->n_rows + 1, n = (size_t)w->n_groups * w->per_group;
    for (size_t h = 0; h < n; h++) {
        bool cut = false;
        for (uint32_t r = 0; r < b->n_rows; r++) {
            cut = cut || b->prune[r * n + h] > 0;
            if (cut)
                w->loss[h / w->per_group * rows + r + 1] += loss_at_axis(levels, n_levels, loss + h, n, w->x[r + 1]);
        }
    }
}

// Returns the row r for which a group keeps this share between r and r + 1, and in *part how far it is towards r + 1.
static uint32_t find_share(const measured_work *w, uint32_t group, double share, double *part)
{
    const double *at = w->share + (size_t)group * (w->base->n_rows + 1);
    uint32_t r = 0;
    while (r + 1 < w->base->n_rows && at[r + 1] > share) r++;
    double room = at[r] - at[r + 1];
    *part = room > 0 ? fmin(1, fmax(0, (at[r] - share) / room)) : 0;
    return r;
}

static double group_loss(const measured_work *w, uint32_t group, double share)
{
    const double *lost = w->loss + (size_t)group * (w->base->n_rows + 1);
    double part;
    uint32_t r = find_share(w, group, share, &part);
    return lost[r] + (lost[r + 1] - lost[r]) * part;
}

// Allocates budgets to the groups with the solver's own curves, hulls and sweep.
static kvb_status allocate(const measured_work *w, const double *ratios, uint32_t n_ratios, allocation *a,
                           kvb_error *err)
{
    uint32_t L = w->base->n_layers;
    cache_shape shape = {L, w->n_groups / L, UNITS, 0, 0};
    loss_curves c = loss_curves_make(&shape);
    hulls h;
    hulls_init(&h, &shape);
    allocation_init(a, &shape, w->base->by_layer ? SCOPE_LAYER : SCOPE_GLOBAL, n_ratios);
    for (uint32_t g = 0; g < w->n_groups; g++)
        for (uint32_t i = 0; i < UNITS; i++)
            c.gain[(size_t)g * UNITS + i] =
                fmax(0, group_loss(w, g, (double)i / UNITS) - group_loss(w, g, (double)(i + 1) / UNITS));
    loss_curves_sum(&c);
    kvb_status status = hulls_fill(&h, &c, HULL_FEASIBLE, err);
    if (status == KVB_OK) status = greedy_sweep(a, &c, &h, ratios, err);
    loss_curves_free(&c);
    hulls_free(&h);
    return status;
}

// Returns the share that a group of the base keeps at a knot: linear between rows on the axis.
static double share_at(const measured_work *w, uint32_t group, double knot)
{
    uint32_t r = 0;
    while (r + 1 < w->base->n_rows && w->x[r + 1] < shift_axis(knot)) r++;
    double part = fmin(1, fmax(0, (shift_axis(knot) - w->x[r]) / (w->x[r + 1] - w->x[r])));
    const double *at = w->share + (size_t)group * (w->base->n_rows + 1) + r;
    return at[0] + (at[1] - at[0]) * part;
}

// Returns what the base really prunes at a knot: the mean over its groups.
static double pruned_at(const measured_work *w, double knot)
{
    double keep = 0;
    for (uint32_t g = 0; g < w->n_groups; g++) keep += share_at(w, g, knot) / w->n_groups;
    return 1 - keep;
}

// Returns the shift that moves a group from the knot along its curve to this share.
static double move_to_share(const measured_work *w, uint32_t group, double share, double knot)
{
    double part;
    uint32_t r = find_share(w, group, share, &part);
    double x = w->x[r] + (w->x[r + 1] - w->x[r]) * part;
    return fmin(MOST_MOVE, fmax(-MOST_MOVE, x - shift_axis(knot)));
}

static void write_shifts(const measured_work *w, const allocation *a, const double *knots, double *shift)
{
    size_t n = (size_t)w->n_groups * w->per_group;
    for (uint32_t k = 0; k < a->n_rows; k++)
        for (uint32_t g = 0; g < w->n_groups; g++) {
            double move = move_to_share(w, g, (double)a->keep[(size_t)k * w->n_groups + g] / UNITS, knots[k]);
            for (uint32_t i = 0; i < w->per_group; i++) shift[k * n + (size_t)g * w->per_group + i] = move;
        }
}

static kvb_status check_losses(const shift_base *b, const double *levels, uint32_t n_levels, const double *loss,
                               kvb_error *err)
{
    size_t n = (size_t)b->n_layers * b->n_kv_heads;
    if (n_levels < 2 || n_levels > MEASURED_LEVELS_MAX || b->n_rows == 0)
        return kvb_fail(err, KVB_ARGUMENT, "measured curves: %u levels of %u rows, expected 2 to %d", n_levels,
                        b->n_rows, MEASURED_LEVELS_MAX);
    for (uint32_t i = 0; i < n_levels; i++)
        if (!(levels[i] > 0 && levels[i] < 1) || (i && levels[i] <= levels[i - 1]))
            return kvb_fail(err, KVB_ARGUMENT, "measured curves: level %g, expected ascending ones between 0 and 1",
                            levels[i]);
    for (size_t i = 0; i < n_levels * n; i++)
        if (!isfinite(loss[i]))
            return kvb_fail(err, KVB_NUMERIC, "measured curves: loss %g of head %zu", loss[i], i % n);
    return KVB_OK;
}

kvb_status measured_shifts(const shift_base *base, const double *levels, uint32_t n_levels, const double *loss,
                           bool heads, const double *knots, uint32_t n_knots, double *shift, kvb_error *err)
{
    kvb_status status = check_losses(base, levels, n_levels, loss, err);
    if (status != KVB_OK) return status;
    measured_work w = measured_work_open(base, heads ? base->n_layers * base->n_kv_heads : base->n_layers);
    double *pruned = need(n_knots, sizeof *pruned, "ratios");
    allocation a = {0};
    fill_losses(&w, levels, n_levels, loss);
    for (uint32_t k = 0; k < n_knots; k++) pruned[k] = pruned_at(&w, knots[k]);
    status = allocate(&w, pruned, n_knots, &a, err);
    if (status == KVB_OK) write_shifts(&w, &a, knots, shift);
    allocation_free(&a);
    free_all(pruned, w.x); // x begins the block that holds all of its arrays
    return status;
}

void shifts_to_table(const shift_base *base, const shift_base *to, const double *knots, uint32_t n_knots, double *shift)
{
    uint32_t n = base->n_layers * base->n_kv_heads;
    measured_work w = measured_work_open(base, n), other = measured_work_open(to, n);
    for (uint32_t k = 0; k < n_knots; k++)
        for (uint32_t h = 0; h < n; h++)
            shift[(size_t)k * n + h] = move_to_share(&w, h, share_at(&other, h, knots[k]), knots[k]);
    free_all(w.x, other.x); // x begins the block that holds all of their arrays
}
