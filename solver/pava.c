#include "solver/pava.h"
#include "runtime/fail.h"
#include <omp.h>
#include <stdlib.h>

// Rounded divisions can put neighbours that passed the comparison in the wrong order by one unit in the last place.
static void set_slopes(hull_block *blocks, size_t count)
{
    for (size_t k = 0; k < count; k++) {
        blocks[k].slope = blocks[k].sum / blocks[k].length;
        if (k > 0 && blocks[k].slope > blocks[k - 1].slope) blocks[k].slope = blocks[k - 1].slope;
    }
}

size_t pava_blocks(hull_block *blocks, const double *gains, size_t n)
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
        h->count[n] = (uint32_t)pava_blocks(h->block + n * m, c->gain + n * m + h->first, m - h->first);
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
