#include "solver/aggregate.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdbool.h>
#include <string.h>

void ratio_mean_init(ratio_mean *r, uint32_t n_rows, uint32_t n_heads)
{
    *r = (ratio_mean){.n_rows = n_rows, .n_heads = n_heads};
    r->sum = need((size_t)n_rows * n_heads, sizeof *r->sum, "ratios");
    r->square = need((size_t)n_rows * n_heads, sizeof *r->square, "ratios");
}

void ratio_mean_free(ratio_mean *r)
{
    free_all(r->sum, r->square);
    *r = (ratio_mean){0};
}

void ratio_mean_add(ratio_mean *r, const allocation *a, uint32_t n_tokens)
{
    double before = r->count ? 1.0 / (double)r->count : 0, after = 1.0 / (double)++r->count;
    for (size_t i = 0; i < (size_t)r->n_rows * r->n_heads; i++) {
        double x = 1.0 - (double)a->keep[i] / n_tokens, old = r->sum[i] * before;
        r->sum[i] += x;
        r->square[i] += (x - old) * (x - r->sum[i] * after);
    }
}

void ratio_mean_get(const ratio_mean *r, double *mean, double *std)
{
    for (size_t i = 0; i < (size_t)r->n_rows * r->n_heads; i++) {
        if (mean) mean[i] = r->count ? r->sum[i] / (double)r->count : 0;
        // Rounding may leave a sum of squares a little below 0 when all pairs agree.
        if (std) std[i] = r->count && r->square[i] > 0 ? sqrt(r->square[i] / (double)r->count) : 0;
    }
}

void loss_curves_shrink(loss_curves *c, double a)
{
    size_t n = shape_heads(&c->shape), m = shape_middle(&c->shape);
    if (!(a > 0)) return;
#pragma omp parallel for schedule(static) if (n * m > PARALLEL_CELLS)
    for (size_t i = 0; i < m; i++) {
        double mean = 0;
        for (size_t h = 0; h < n; h++) mean += c->gain[h * m + i];
        mean /= (double)n;
        for (size_t h = 0; h < n; h++) c->gain[h * m + i] = (1 - a) * c->gain[h * m + i] + a * mean;
    }
    double total = c->total;
    loss_curves_sum(c);
    if (c->rises) c->total = total;
}

void loss_mean_init(loss_mean *m, const cache_shape *grid)
{
    *m = (loss_mean){.curves = loss_curves_make(grid)};
    m->curves.floor = shape_protected(grid);
}

void loss_mean_init_coarse(loss_mean *m, const cache_shape *longest, uint32_t steps)
{
    cache_shape grid = {longest->n_layers, longest->n_kv_heads, longest->n_tokens < steps ? longest->n_tokens : steps,
                        0, 0};
    loss_mean_init(m, &grid);
    m->coarse = true;
}

void loss_mean_free(loss_mean *m)
{
    loss_curves_free(&m->curves);
    *m = (loss_mean){0};
}

// One head's curve read off at kept share (p + i) / grid, i = 0 .. grid_middle, between its own tokens by a straight
// line. The steps of the result, each times `weight`, are added to gain[grid_middle]. Below the protected tokens the
// curve is flat: nothing of the middle region is kept there.
static void add_resampled(double *gain, uint32_t grid, uint32_t grid_middle, const double *loss, uint32_t n_tokens,
                          uint32_t middle, double weight, bool rises)
{
    double scale = (double)n_tokens / grid, last = 0;
    uint32_t p = n_tokens - middle, grid_p = grid - grid_middle;
    for (uint32_t i = 0; i <= grid_middle; i++) {
        double x = (double)(grid_p + i) * scale - p, value = loss[0];
        if (i == grid_middle) {
            value = 0; // all is kept; set exactly, so that the steps add up to the whole mass
        } else if (x > 0) {
            uint32_t c = (uint32_t)x < middle ? (uint32_t)x : middle - 1;
            value = loss[c] + (x - c) * (loss[c + 1] - loss[c]);
        }
        if (i > 0 && (rises || last > value)) gain[i - 1] += (last - value) * weight;
        last = value;
    }
}

static kvb_status check_grid(const loss_mean *m, const cache_shape *s, kvb_error *err)
{
    const cache_shape *grid = &m->curves.shape;
    if (s->n_layers != grid->n_layers || s->n_kv_heads != grid->n_kv_heads ||
        (!m->coarse && (s->sink != grid->sink || s->window != grid->window)))
        return kvb_fail(
            err, KVB_MISMATCH, "solver: mean loss: expected %u x %u heads, sink %u, window %u, found %u x %u, %u, %u",
            grid->n_layers, grid->n_kv_heads, grid->sink, grid->window, s->n_layers, s->n_kv_heads, s->sink, s->window);
    if (!m->coarse && s->n_tokens > grid->n_tokens)
        return kvb_fail(err, KVB_ARGUMENT, "solver: mean loss: a context of %u tokens on a grid of %u", s->n_tokens,
                        grid->n_tokens);
    return KVB_OK;
}

kvb_status loss_mean_add(loss_mean *mean, const loss_curves *c, kvb_error *err)
{
    kvb_status status = check_grid(mean, &c->shape, err);
    if (status != KVB_OK) return status;
    const cache_shape *grid = &mean->curves.shape, *s = &c->shape;
    size_t n = shape_heads(s), m = shape_middle(s), grid_m = shape_middle(grid);
    mean->count++;
    mean->floors += (double)c->floor / s->n_tokens;
    if (!(c->total > 0)) return KVB_OK;
    double weight = 1 / c->total;
    mean->curves.rises |= c->rises;
#pragma omp parallel for schedule(static) if (n * grid_m > PARALLEL_CELLS)
    for (size_t h = 0; h < n; h++) {
        double *gain = mean->curves.gain + h * grid_m;
        if (m == grid_m && s->n_tokens == grid->n_tokens)
            for (size_t i = 0; i < m; i++) gain[i] += c->gain[h * m + i] * weight;
        else
            add_resampled(gain, grid->n_tokens, (uint32_t)grid_m, c->loss + h * (m + 1), s->n_tokens, (uint32_t)m,
                          weight, c->rises);
    }
    return KVB_OK;
}

void loss_mean_join(loss_mean *m, const loss_mean *other)
{
    size_t cells = (size_t)shape_heads(&m->curves.shape) * shape_middle(&m->curves.shape);
    m->curves.rises |= other->curves.rises;
    for (size_t i = 0; i < cells; i++) m->curves.gain[i] += other->curves.gain[i];
    m->floors += other->floors;
    m->count += other->count;
}

void loss_mean_finish(loss_mean *m)
{
    size_t cells = (size_t)shape_heads(&m->curves.shape) * shape_middle(&m->curves.shape);
    for (size_t i = 0; i < cells && m->count; i++) m->curves.gain[i] /= (double)m->count;
    double share = m->count ? ceil(m->floors / (double)m->count * m->curves.shape.n_tokens - 1e-6) : 0;
    if (share > m->curves.floor) m->curves.floor = (uint32_t)fmin(share, m->curves.shape.n_tokens);
    loss_curves_sum(&m->curves);
}

void loss_mean_weigh(loss_curves *out, const loss_mean *means, size_t n, const double *weight)
{
    size_t cells = (size_t)shape_heads(&out->shape) * shape_middle(&out->shape);
    memset(out->gain, 0, cells * sizeof *out->gain);
    out->floor = 0;
    for (size_t k = 0; k < n; k++) {
        const loss_curves *one = &means[k].curves;
        for (size_t i = 0; weight[k] > 0 && i < cells; i++) out->gain[i] += weight[k] * one->gain[i];
        if (one->floor > out->floor) out->floor = one->floor;
    }
    loss_curves_sum(out);
}

// Finds the head with the largest fraction among those that still have their floor; the lower index wins ties.
static uint32_t largest_fraction(const double *ratio, uint32_t n, uint32_t n_tokens, const uint32_t *keep)
{
    uint32_t best = n;
    double most = -1;
    for (uint32_t g = 0; g < n; g++) {
        double ideal = (1 - ratio[g]) * n_tokens, fraction = ideal - floor(ideal);
        if (keep[g] == (uint32_t)floor(ideal) && fraction > most) {
            most = fraction;
            best = g;
        }
    }
    return best;
}

void round_layers(const double *prune_ratio, uint32_t n_layers, uint32_t n_kv_heads, uint32_t n_tokens, uint32_t *keep)
{
    for (uint32_t l = 0; l < n_layers; l++) {
        const double *ratio = prune_ratio + (size_t)l * n_kv_heads;
        uint32_t *own = keep + (size_t)l * n_kv_heads;
        double sum = 0;
        int64_t left = 0;
        for (uint32_t g = 0; g < n_kv_heads; g++) {
            double ideal = (1 - ratio[g]) * n_tokens;
            sum += ideal;
            own[g] = (uint32_t)floor(ideal);
            left -= own[g];
        }
        left += (int64_t)fmax(rint(sum), n_kv_heads);
        for (uint32_t g; left > 0 && (g = largest_fraction(ratio, n_kv_heads, n_tokens, own)) < n_kv_heads; left--)
            own[g]++;
        for (uint32_t g = 0; g < n_kv_heads; g++) own[g] = own[g] < 1 ? 1 : own[g] > n_tokens ? n_tokens : own[g];
    }
}

void table_loss_add(double *sum, const loss_curves *c, uint32_t n_rows, const double *prune_ratio, uint32_t *keep)
{
    if (!(c->total > 0)) return;
    uint32_t n = shape_heads(&c->shape);
    for (uint32_t r = 0; r < n_rows; r++) {
        round_layers(prune_ratio + (size_t)r * n, c->shape.n_layers, c->shape.n_kv_heads, c->shape.n_tokens, keep);
        double loss = 0;
        for (uint32_t h = 0; h < n; h++) loss += loss_at(c, h, keep[h]);
        sum[r] += loss / c->total;
    }
}
