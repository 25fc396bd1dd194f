#include "solver/pava.h"
#include "runtime/fail.h"
#include <math.h>
#include <omp.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

// Rounded divisions can put neighbours that passed the comparison in the wrong order by one unit in the last place.
static void set_slopes(hull_block *blocks, size_t count)
{
    for (size_t k = 0; k < count; k++) {
        blocks[k].slope = blocks[k].sum / blocks[k].length;
        if (k > 0 && blocks[k].slope > blocks[k - 1].slope) blocks[k].slope = blocks[k - 1].slope;
    }
}

static size_t pool(hull_block *blocks, const double *gains, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        double sum = gains[i];
        uint32_t length = 1;
        while (count > 0 && blocks[count - 1].sum * length < sum * blocks[count - 1].length) {
            count--;
            sum += blocks[count].sum;
            length += blocks[count].length;
        }
        blocks[count++] = (hull_block){.sum = sum, .length = length};
    }
    return count;
}

size_t pava_blocks(hull_block *blocks, const double *gains, size_t n)
{
    size_t count = pool(blocks, gains, n);
    set_slopes(blocks, count);
    return count;
}

// ---- The same, faster where blocks are long ---------------------------------------------------------------------------
//
// PAVA mispredicts a branch at nearly every token of a noisy curve. Hull vertices can be found from the other side: of
// all points, the one deepest below the chord between two vertices is a vertex (quickhull), and where none is below,
// the chord is a block. Deepest points are found without branches. Whatever is nearer to a chord than rounding can tell,
// ties for example, is left to PAVA, as are short pieces: a vertex splits PAVA's scan into two independent ones.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

enum { LANES = 8 };
typedef double lanes __attribute__((vector_size(LANES * sizeof(double))));
typedef int64_t lane_masks __attribute__((vector_size(LANES * sizeof(double))));

// The least of loss[i] - slope i over i = 1 .. n - 1, and the first i where it is. No sum depends on the width of vectors.
WIDE static double least_deviation(const double *loss, size_t n, double slope, size_t *at)
{
    const lanes step = {LANES, LANES, LANES, LANES, LANES, LANES, LANES, LANES};
    size_t i = 1, end = 1 + (n - 1) / LANES * LANES;
    lanes index = {1, 2, 3, 4, 5, 6, 7, 8}, where = index, least = {0};
    least += INFINITY;
    for (; i < end; i += LANES, index += step) {
        lanes d;
        memcpy(&d, loss + i, sizeof d);
        d -= slope * index;
        lane_masks below = d < least;
        least = (lanes)(((lane_masks)d & below) | ((lane_masks)least & ~below));
        where = (lanes)(((lane_masks)index & below) | ((lane_masks)where & ~below));
    }
    double value = least[0], place = where[0];
    for (int k = 1; k < LANES; k++) {
        bool better = least[k] < value || (least[k] == value && where[k] < place);
        value = better ? least[k] : value;
        place = better ? where[k] : place;
    }
    for (; i < n; i++) {
        double d = loss[i] - slope * (double)i;
        if (d < value) {
            value = d;
            place = (double)i;
        }
    }
    *at = (size_t)place;
    return value;
}

static double sum_gains(const double *gains, size_t n)
{
    double part[4] = {0, 0, 0, 0}, rest = 0;
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (size_t k = 0; k < 4; k++) part[k] += gains[i + k];
    for (; i < n; i++) rest += gains[i];
    return (part[0] + part[1]) + (part[2] + part[3]) + rest;
}

// Blocks of the tokens between two vertices, behind blocks[count]; returns the new count.
static size_t split(hull_block *blocks, size_t count, const double *gains, const double *loss, size_t n, int depth)
{
    enum { SHORT = 12, DEEPEST = 40 };
    if (n <= SHORT || depth == DEEPEST) return count + pool(blocks + count, gains, n);
    // Losses are off by a few units in the last place of loss[0], and so is every point of the chord.
    double slope = (loss[n] - loss[0]) / (double)n, tolerance = 0x1p-48 * loss[0];
    size_t at;
    double depth_below = least_deviation(loss, n, slope, &at) - loss[0];
    if (depth_below > tolerance) {
        blocks[count] = (hull_block){.sum = sum_gains(gains, n), .length = (uint32_t)n};
        return count + 1;
    }
    if (depth_below >= -tolerance) return count + pool(blocks + count, gains, n);
    count = split(blocks, count, gains, loss, at, depth + 1);
    return split(blocks, count, gains + at, loss + at, n - at, depth + 1);
}

size_t curve_blocks(hull_block *blocks, const double *gains, const double *loss, size_t n)
{
    size_t count = n ? split(blocks, 0, gains, loss, n, 0) : 0;
    set_slopes(blocks, count);
    return count;
}

size_t published_blocks(hull_block *blocks, const double *gains, size_t n, uint32_t *points, float *cumulative)
{
    cumulative[0] = 0;
    for (size_t k = 0; k < n; k++) cumulative[k + 1] = cumulative[k] + (float)gains[n - 1 - k];
    size_t top = 0;
    for (uint32_t k = 0; k <= n; k++) {
        while (top > 1) {
            uint32_t a = points[top - 2], b = points[top - 1];
            double cross = (double)(b - a) * ((double)cumulative[k] - (double)cumulative[a]) -
                           ((double)cumulative[b] - (double)cumulative[a]) * (double)(k - a);
            if (cross > 0) break;
            top--;
        }
        points[top++] = k;
    }
    // Points run from the first drop to the last; blocks from the best token to the worst.
    for (size_t k = 0; k + 1 < top; k++) {
        uint32_t a = points[top - 2 - k], b = points[top - 1 - k];
        double sum = (double)cumulative[b] - (double)cumulative[a];
        blocks[k] = (hull_block){.sum = sum, .slope = (double)(float)(sum / (b - a)), .length = b - a};
    }
    return top - 1;
}

kvb_status hulls_init(hulls *h, const cache_shape *shape, kvb_error *err)
{
    *h = (hulls){0};
    kvb_status status = cache_shape_check(shape, err);
    if (status) return status;
    size_t n = shape_heads(shape), m = shape_middle(shape);
    *h = (hulls){.n_heads = (uint32_t)n, .stride = (uint32_t)m};
    h->count = calloc(n, sizeof *h->count);
    h->block = malloc(n * m * sizeof *h->block);
    if (h->count && h->block) return KVB_OK;
    hulls_free(h);
    return kvb_fail(err, KVB_MEMORY, "solver: not enough memory for the hulls of %zu heads of %zu tokens", n, m);
}

void hulls_free(hulls *h)
{
    free(h->count);
    free(h->block);
    *h = (hulls){0};
}

static kvb_status fill_published(hulls *h, const loss_curves *c, kvb_error *err)
{
    size_t m = h->stride, threads = (size_t)omp_get_max_threads();
    uint32_t *points = malloc(threads * (m + 1) * sizeof *points);
    float *cumulative = malloc(threads * (m + 1) * sizeof *cumulative);
    if (!points || !cumulative) {
        free(points);
        free(cumulative);
        return kvb_fail(err, KVB_MEMORY, "solver: not enough memory for the hulls of %u heads", h->n_heads);
    }
#pragma omp parallel for schedule(static) if ((size_t)h->n_heads * m > PARALLEL_CELLS)
    for (size_t n = 0; n < h->n_heads; n++) {
        size_t own = (size_t)omp_get_thread_num() * (m + 1);
        h->count[n] = (uint32_t)published_blocks(h->block + n * m, c->gain + n * m, m, points + own, cumulative + own);
    }
    free(points);
    free(cumulative);
    return KVB_OK;
}

kvb_status hulls_fill(hulls *h, const loss_curves *c, hull_range range, kvb_error *err)
{
    uint32_t m = shape_middle(&c->shape);
    if (h->n_heads != shape_heads(&c->shape) || h->stride != m)
        return kvb_fail(err, KVB_ARGUMENT, "solver: the hulls were made for another shape than the curves");
    if (c->floor < shape_protected(&c->shape) || c->floor > c->shape.n_tokens)
        return kvb_fail(err, KVB_ARGUMENT, "solver: expected a floor of %u..%u tokens, found %u",
                        shape_protected(&c->shape), c->shape.n_tokens, c->floor);
    h->range = range;
    h->first = range == HULL_FULL ? 0 : c->floor - shape_protected(&c->shape);
    if (range == HULL_FULL) return fill_published(h, c, err);
#pragma omp parallel for schedule(static) if ((size_t)h->n_heads * m > PARALLEL_CELLS)
    for (size_t n = 0; n < h->n_heads; n++)
        h->count[n] = (uint32_t)curve_blocks(h->block + n * m, c->gain + n * m + h->first,
                                             c->loss + n * (m + 1) + h->first, m - h->first);
    return KVB_OK;
}

double hulls_gap(const hulls *h, const loss_curves *c, const uint32_t *keep)
{
    uint32_t m = h->stride, p = shape_protected(&c->shape);
    double gap = 0;
    for (uint32_t n = 0; n < h->n_heads; n++) {
        // The hull meets the curve where blocks end; inside a block it falls by the block's slope.
        const hull_block *block = h->block + (size_t)n * m;
        const double *loss = c->loss + (size_t)n * (m + 1);
        uint32_t at = keep[n] > p ? keep[n] - p : 0, begin = h->first, k = 0;
        while (k < h->count[n] && begin + block[k].length <= at) begin += block[k++].length;
        if (k == h->count[n]) continue;
        gap += loss[at] - (loss[begin] - (at - begin) * block[k].slope);
    }
    return gap;
}
