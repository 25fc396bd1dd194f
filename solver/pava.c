#include "solver/pava.h"
#include "runtime/fail.h"
#include "solver/wide.h"
#include <math.h>
#include <omp.h>
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

static size_t push_tokens(hull_block *blocks, size_t count, const double *gains, size_t n)
{
    for (size_t i = 0; i < n; i++) count = push(blocks, count, gains[i], 1);
    return count;
}

size_t pava_blocks(hull_block *blocks, const double *gains, size_t n)
{
    size_t count = push_tokens(blocks, 0, gains, n);
    set_slopes(blocks, count);
    return count;
}

// ---- The same, faster where blocks are long
// ---------------------------------------------------------------------------
//
// PAVA mispredicts a branch at nearly every token of a noisy curve. Hull vertices can be found from the other side: of
// all points, the one deepest below the chord between two vertices is a vertex (quickhull), and where none is below,
// the chord is a block. Deepest points are found without branches, in float32: a point that only seems to be a vertex
// does no harm, since pooling is right whatever the pieces it begins with. What must be sure is that a chord is a
// block: pieces with points nearer to the chord than float32 can tell, ties for example, are left to PAVA, as are short
// ones.

enum { LANES = 16 };
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t lane_masks __attribute__((vector_size(LANES * sizeof(float))));

// x with every lane taken from k lanes further on.
#ifdef __clang__
#define TURNED(x, k)                                                                                           \
    __builtin_shufflevector(x, x, (k), (k) + 1, (k) + 2, (k) + 3, (k) + 4, (k) + 5, (k) + 6, (k) + 7, (k) + 8, \
                            (k) + 9, (k) + 10, (k) + 11, (k) + 12, (k) + 13, (k) + 14, (k) + 15)
#else
#define TURNED(x, k) \
    __builtin_shuffle(x, ((lane_masks){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (k)) & (LANES - 1))
#endif

// The least values so far, and where they are. Pointers: vectors as arguments would depend on the width.
typedef struct deepest {
    lanes value, at;
} deepest;

static inline __attribute__((always_inline)) void deepen(deepest *d, const lanes *value, const lanes *at)
{
    lane_masks less = *value < d->value;
    d->at = (lanes)(((lane_masks)*at & less) | ((lane_masks)d->at & ~less));
    d->value = (lanes)(((lane_masks)*value & less) | ((lane_masks)d->value & ~less));
}

static inline __attribute__((always_inline)) void look(deepest *d, const float *loss, const lanes *at, float slope)
{
    lanes value;
    memcpy(&value, loss, sizeof value);
    value -= slope * *at;
    deepen(d, &value, at);
}

// The least of loss[i] - slope i over i = 1 .. n - 1, and an i where it is; n > LANES. The sums, and of equal values
// the one that is taken, do not depend on the width of the machine's vectors.
WIDE static float least_deviation(const float *loss, size_t n, float slope, size_t *at)
{
    const lanes first = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    lanes here = first + 1.0f, next;
    deepest even = {{0}, here}, odd;
    even.value += INFINITY;
    odd = even;
    size_t i = 1;
    for (; i + 2 * LANES <= n; i += 2 * LANES, here += 2.0f * LANES) {
        next = here + (float)LANES;
        look(&even, loss + i, &here, slope);
        look(&odd, loss + i + LANES, &next, slope);
    }
    // The last ones, some of them a second time.
    i = n > 2 * LANES ? n - 2 * LANES : 1;
    here = first + (float)(int)i;
    look(&even, loss + i, &here, slope);
    next = first + (float)(int)(n - LANES);
    look(&odd, loss + n - LANES, &next, slope);
    deepen(&even, &odd.value, &odd.at);
#define FOLD(k)                                                 \
    odd = (deepest){TURNED(even.value, k), TURNED(even.at, k)}; \
    deepen(&even, &odd.value, &odd.at)
    FOLD(8);
    FOLD(4);
    FOLD(2);
    FOLD(1);
#undef FOLD
    *at = (size_t)(int)even.at[0];
    return even.value[0];
}

// One head: what blocks are made from, and the blocks so far.
typedef struct splitting {
    const double *gains, *loss;
    const float *rounded; // [n + 1] losses as shares of the first one
    hull_block *blocks;
    size_t count;
} splitting;

// Adds the blocks of the tokens begin .. end - 1.
static void split(splitting *s, size_t begin, size_t end, int depth)
{
    enum { SHORT = LANES, DEEPEST = 40, LONGEST = 1 << 24 }; // float32 counts no further
    size_t n = end - begin, at;
    if (n > SHORT && n < LONGEST && depth < DEEPEST) {
        const float *loss = s->rounded + begin;
        // Rounding moves loss, slope and their difference by no more than 2^-22 of loss[0] together.
        float slope = (loss[n] - loss[0]) / (float)n, tolerance = 0x1p-20f * loss[0];
        float below = least_deviation(loss, n, slope, &at) - loss[0];
        if (below > tolerance) {
            s->count = push(s->blocks, s->count, s->loss[begin] - s->loss[end], (uint32_t)n);
            return;
        }
        if (below < -tolerance) {
            split(s, begin, begin + at, depth + 1);
            split(s, begin + at, end, depth + 1);
            return;
        }
    }
    s->count = push_tokens(s->blocks, s->count, s->gains + begin, n);
}

WIDE static void round_losses(float *out, const double *loss, size_t n, double scale)
{
    for (size_t i = 0; i < n; i++) out[i] = (float)(loss[i] * scale);
}

size_t curve_blocks(hull_block *blocks, const double *gains, const double *loss, size_t n, float *rounded)
{
    splitting s = {gains, loss, rounded, blocks, 0};
    // All zero, or too small to divide by: PAVA alone.
    round_losses(rounded, loss, n + 1, loss[0] > 0x1p-1000 ? 1 / loss[0] : 0);
    split(&s, 0, n, 0);
    set_slopes(blocks, s.count);
    return s.count;
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

kvb_status hulls_fill(hulls *h, const loss_curves *c, hull_range range, kvb_error *err)
{
    uint32_t m = shape_middle(&c->shape);
    if (h->n_heads != shape_heads(&c->shape) || h->stride != m)
        return kvb_fail(err, KVB_ARGUMENT, "solver: the hulls were made for another shape than the curves");
    if (c->floor < shape_protected(&c->shape) || c->floor > c->shape.n_tokens)
        return kvb_fail(err, KVB_ARGUMENT, "solver: expected a floor of %u..%u tokens, found %u",
                        shape_protected(&c->shape), c->shape.n_tokens, c->floor);
    size_t threads = (size_t)omp_get_max_threads();
    float *sums = malloc(threads * (m + 1) * sizeof *sums);
    uint32_t *points = range == HULL_FULL ? malloc(threads * (m + 1) * sizeof *points) : NULL;
    if (!sums || (range == HULL_FULL && !points)) {
        free(sums);
        free(points);
        return kvb_fail(err, KVB_MEMORY, "solver: not enough memory for the hulls of %u heads", h->n_heads);
    }
    h->range = range;
    h->first = range == HULL_FULL ? 0 : c->floor - shape_protected(&c->shape);
#pragma omp parallel for schedule(static) if ((size_t)h->n_heads * m > PARALLEL_CELLS)
    for (size_t n = 0; n < h->n_heads; n++) {
        size_t own = (size_t)omp_get_thread_num() * (m + 1);
        hull_block *block = h->block + n * m;
        const double *gain = c->gain + n * m + h->first, *loss = c->loss + n * (m + 1) + h->first;
        h->count[n] = (uint32_t)(points ? published_blocks(block, gain, m, points + own, sums + own)
                                        : curve_blocks(block, gain, loss, m - h->first, sums + own));
    }
    free(sums);
    free(points);
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
