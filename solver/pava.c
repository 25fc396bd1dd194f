#include "solver/pava.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/wide.h"
#include <math.h>
#include <stdlib.h>

// Rounded divisions can put neighbours that passed the comparison in the wrong order by one unit in the last place.
static void set_slopes(hull_block *blocks, size_t count)
{
    for (size_t k = 0; k < count; k++) {
        blocks[k].slope = blocks[k].sum / blocks[k].length;
        if (k > 0 && blocks[k].slope > blocks[k - 1].slope) blocks[k].slope = blocks[k - 1].slope;
    }
}

// Puts a block behind blocks[count], and pools it with those before it as long as they are worth less per token.
static inline size_t push(hull_block *blocks, size_t count, double sum, uint32_t length)
{
    while (count > 0 && blocks[count - 1].sum * length < sum * blocks[count - 1].length) {
        count--;
        sum += blocks[count].sum;
        length += blocks[count].length;
    }
    blocks[count] = (hull_block){.sum = sum, .length = length};
    return count + 1;
}

size_t pava_blocks(hull_block *blocks, const double *gains, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count = push(blocks, count, gains[i], 1);
    set_slopes(blocks, count);
    return count;
}

//
// PAVA mispredicts a branch at nearly every token of a noisy curve. Hull vertices can be found from the other side: of
// all points, the one deepest below the chord between two vertices is a vertex (quickhull), and where none is below,
// the chord is a block. Deepest points are found without branches, in float32: a point that only seems to be a vertex
// does no harm, since pooling is right whatever the pieces it begins with. What must be sure is that a chord is a
// block: pieces with points nearer to the chord than float32 can tell, ties for example, are left to PAVA, as are short
// ones.

// The least of loss[i] - slope i over 0 < i < n, and the first i where it is. Found without branches, then looked for.
WIDE static float least_deviation(const float *loss, int n, float slope, int *at)
{
    float least = INFINITY;
#pragma omp simd reduction(min : least)
    for (int i = 1; i < n; i++) {
        float value = loss[i] - slope * (float)i;
        least = value < least ? value : least;
    }
    for (*at = 1; loss[*at] - slope * (float)*at != least;) ++*at;
    return least;
}

// One head: what blocks are made from, and the blocks so far.
typedef struct splitting {
    const double *gains, *loss;
    const float *rounded; // losses as shares of the first one
    hull_block *blocks;
    size_t count;
} splitting;

// Adds the blocks of n tokens from `begin` on.
static void split(splitting *s, size_t begin, int n, int depth)
{
    enum { SHORT = 16, DEEPEST = 40, LONGEST = 1 << 24 }; // float32 counts no further
    int at;
    if (n > SHORT && n < LONGEST && depth < DEEPEST) {
        const float *loss = s->rounded + begin;
        // Rounding moves loss, slope and their difference by no more than 2^-22 of loss[0] together.
        float slope = (loss[n] - loss[0]) / (float)n, tolerance = 0x1p-20f * loss[0];
        float below = least_deviation(loss, n, slope, &at) - loss[0];
        if (below > tolerance) {
            s->count = push(s->blocks, s->count, s->loss[begin] - s->loss[begin + (size_t)n], (uint32_t)n);
            return;
        }
        if (below < -tolerance) {
            split(s, begin, at, depth + 1);
            split(s, begin + (size_t)at, n - at, depth + 1);
            return;
        }
    }
    for (size_t i = begin; i < begin + (size_t)n; i++) s->count = push(s->blocks, s->count, s->gains[i], 1);
}

size_t curve_blocks(hull_block *blocks, const double *gains, const double *loss, size_t n)
{
    float *rounded = need_more(NULL, n + 1, sizeof *rounded, "losses");
    splitting s = {gains, loss, rounded, blocks, 0};
    double scale = loss[0] > 0x1p-1000 ? 1 / loss[0] : 0; // all zero, or too small to divide by: PAVA alone
    for (size_t i = 0; i <= n; i++) rounded[i] = (float)(loss[i] * scale);
    split(&s, 0, (int)n, 0);
    set_slopes(blocks, s.count);
    free(rounded);
    return s.count;
}

size_t published_blocks(hull_block *blocks, const double *gains, size_t n)
{
    uint32_t *points = need_more(NULL, n + 1, sizeof *points, "points");
    float *cumulative = need_more(NULL, n + 1, sizeof *cumulative, "losses");
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
    free_all(points, cumulative);
    return top - 1;
}

void hulls_init(hulls *h, const cache_shape *shape)
{
    size_t n = shape_heads(shape), m = shape_middle(shape);
    *h = (hulls){.n_heads = (uint32_t)n, .stride = (uint32_t)m};
    h->count = need(n, sizeof *h->count, "heads");
    h->block = need_more(NULL, n * m, sizeof *h->block, "blocks of hulls");
}

void hulls_free(hulls *h)
{
    free_all(h->count, h->block);
    *h = (hulls){0};
}

kvb_status hulls_fill(hulls *h, const loss_curves *c, hull_range range, kvb_error *err)
{
    uint32_t m = shape_middle(&c->shape);
    if (h->n_heads != shape_heads(&c->shape) || h->stride != m)
        return kvb_fail(err, KVB_ARGUMENT, "solver: the hulls were made for another shape than the curves");
    if (c->floor < shape_protected(&c->shape) || c->floor > c->shape.n_tokens)
        return kvb_fail(err, KVB_ARGUMENT, "solver: expected a floor of %u..%u tokens, found %u",
                        shape_protected(&c->shape), c->shape.n_tokens, c->floor);
    h->first = range == HULL_FULL ? 0 : c->floor - shape_protected(&c->shape);
#pragma omp parallel for schedule(static) if ((size_t)h->n_heads * m > PARALLEL_CELLS)
    for (size_t n = 0; n < h->n_heads; n++) {
        hull_block *block = h->block + n * m;
        const double *gain = c->gain + n * m + h->first, *loss = c->loss + n * (m + 1) + h->first;
        h->count[n] = (uint32_t)(range == HULL_FULL ? published_blocks(block, gain, m)
                                                    : curve_blocks(block, gain, loss, m - h->first));
    }
    return KVB_OK;
}
