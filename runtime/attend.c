// Attention of one decode step over heads that keep different numbers of rows. kvbudget.h has the contract.
// The rows are read once, in order, a block at a time. All that is stored of the rows so far is a maximum, a sum and
// the output of each query (online softmax, arXiv 1805.02867), so memory does not grow with the cache, and time is
// proportional to the rows. A strip of rows serves all queries of the group before the next strip is read.
#include "fail.h"
#include "vector.h"
#include <float.h>
#include <string.h>

enum { BLOCK = 32, STRIP = 8, TILE = 4, LANES = 8 };
#define INLINE static inline __attribute__((always_inline)) // into each VECTOR_CLONES copy

// ---- Strips of rows ----

// How many rows lie side by side from a head's row `at` on, at most a strip; *row is the first one's number in k and v.
static uint32_t rows_together(const kvb_attend_cache *c, uint32_t head, uint32_t at, uint32_t most, size_t *row)
{
    size_t begin = (size_t)c->begin[head];
    uint32_t left = c->pages ? c->page_rows - at % c->page_rows : most;
    *row = c->pages ? (size_t)c->pages[begin + at / c->page_rows] * c->page_rows + at % c->page_rows : begin + at;
    left = left < most ? left : most;
    return left < STRIP ? left : STRIP;
}

// Pages can lie anywhere, so the processor cannot guess what comes next: prefetches the rows into the second cache.
static void ask_for_rows(const kvb_attend_cache *c, const void *rows, uint32_t head, uint32_t at)
{
    size_t row, size = (c->format == KVB_ROWS_F32 ? 4 : 2) * (size_t)c->head_dim;
    if (at >= c->lengths[head]) return;
    uint32_t n = rows_together(c, head, at, c->lengths[head] - at, &row);
    for (size_t i = 0; i < n * size; i += 64) __builtin_prefetch((const char *)rows + row * size + i, 0, 2);
}

VECTOR_CLONES static void widen_bf16(uint32_t *to, const uint16_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++) to[i] = (uint32_t)from[i] << 16;
}

// After the shift the exponent is too small by 112. Multiplying by 2^112 mends that, for subnormal numbers too.
VECTOR_CLONES static void widen_f16(uint32_t *to, const uint16_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t half = from[i], bits = (half & 0x7fffu) << 13;
        float size;
        memcpy(&size, &bits, sizeof size);
        size *= 0x1p112f;
        memcpy(&bits, &size, sizeof bits);
        to[i] = bits | ((half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0) | (half & 0x8000u) << 16;
    }
}

typedef union strip_memory {
    uint32_t bits[STRIP * KVB_ATTEND_HEAD_DIM_MAX];
    float x[STRIP * KVB_ATTEND_HEAD_DIM_MAX];
} strip_memory;

// Returns n rows as floats: in place if they are floats, else widened into `to`.
static const float *rows_widened(const kvb_attend_cache *c, const void *rows, size_t row, uint32_t n, strip_memory *to)
{
    size_t at = row * c->head_dim, count = (size_t)n * c->head_dim;
    if (c->format == KVB_ROWS_F32) return (const float *)rows + at;
    (c->format == KVB_ROWS_BF16 ? widen_bf16 : widen_f16)(to->bits, (const uint16_t *)rows + at, count);
    return to->x;
}

// Row i of n. Beyond the end it is the last row again; what is computed from it is dropped or gets the weight 0.
INLINE const float *tile_row(const float *rows, uint32_t i, uint32_t n, uint32_t d)
{
    return rows + (size_t)(i < n ? i : n - 1) * d;
}

// Scores of rows at .. at + TILE - 1 for one or two queries.
INLINE void score_tile(float *scores, const float *q, int queries, const float *k, uint32_t at, uint32_t n, uint32_t d,
                       float scale)
{
    vector s[2][TILE] = {{{0}}}, x, y;
    const float *rows[TILE];
    for (uint32_t i = 0; i < TILE; i++) rows[i] = tile_row(k, at + i, n, d);
    for (uint32_t c = 0; c < d; c += LANES)
#pragma GCC unroll 4
        for (int i = 0; i < TILE; i++) {
            memcpy(&y, rows[i] + c, sizeof y);
#pragma GCC unroll 2
            for (int r = 0; r < queries; r++) {
                memcpy(&x, q + (size_t)r * d + c, sizeof x);
                s[r][i] += x * y;
            }
        }
    for (int r = 0; r < queries; r++)
        for (uint32_t i = 0; i < TILE && at + i < n; i++) {
            x = s[r][i];
            scores[(size_t)r * BLOCK + at + i] =
                scale * (((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])));
        }
}

VECTOR_CLONES static void score_strip(float *scores, const float *q, uint32_t group, const float *k, uint32_t n,
                                      uint32_t d, float scale)
{
    for (uint32_t at = 0; at < n; at += TILE)
        for (uint32_t r = 0; r < group; r += 2)
            if (r + 1 < group) score_tile(scores + r * BLOCK, q + (size_t)r * d, 2, k, at, n, d, scale);
            else score_tile(scores + r * BLOCK, q + (size_t)r * d, 1, k, at, n, d, scale);
}

// Adds TILE rows, each times its weight, to the output o of one or two queries.
INLINE void mix_tile(float *o, const float *weights, int queries, const float *v, uint32_t at, uint32_t n, uint32_t d)
{
    const float *rows[TILE];
    float w[2][TILE] = {{0}};
    for (uint32_t i = 0; i < TILE; i++) rows[i] = tile_row(v, at + i, n, d);
    for (int r = 0; r < queries; r++)
        for (uint32_t i = 0; i < TILE && at + i < n; i++) w[r][i] = weights[(size_t)r * BLOCK + at + i];
    for (uint32_t c = 0; c < d; c += LANES) {
        vector sum[2], y;
        for (int r = 0; r < queries; r++) memcpy(&sum[r], o + (size_t)r * d + c, sizeof y);
#pragma GCC unroll 4
        for (int i = 0; i < TILE; i++) {
            memcpy(&y, rows[i] + c, sizeof y);
            for (int r = 0; r < queries; r++) sum[r] += w[r][i] * y;
        }
        for (int r = 0; r < queries; r++) memcpy(o + (size_t)r * d + c, &sum[r], sizeof y);
    }
}

VECTOR_CLONES static void mix_strip(float *o, const float *weights, uint32_t group, const float *v, uint32_t n,
                                    uint32_t d)
{
    for (uint32_t at = 0; at < n; at += TILE)
        for (uint32_t r = 0; r < group; r += 2)
            if (r + 1 < group) mix_tile(o + (size_t)r * d, weights + r * BLOCK, 2, v, at, n, d);
            else mix_tile(o + (size_t)r * d, weights + r * BLOCK, 1, v, at, n, d);
}

// ---- Blocks ----

// Turns one query's n scores, after cap and bias [BLOCK], into weights relative to the new maximum. Returns the factor
// for the output so far. While all scores are -INFINITY, so is the maximum, and weights are 0. NaN stays NaN.
VECTOR_CLONES static float weigh_block(float *x, uint32_t n, const float *bias, float cap, float *top, float *mass)
{
    float lanes[LANES], now = *top, sum = 0;
    for (uint32_t i = n; i < BLOCK; i++) x[i] = 0;
    for (int i = 0; cap > 0 && i < BLOCK; i++) // tanh(x) = 1 - 2 / (exp(2 x) + 1)
        x[i] = cap * (1 - 2 / (vector_exp(x[i] * (2 / cap)) + 1));
    for (int i = 0; i < BLOCK; i++) x[i] += bias[i];
    for (int j = 0; j < LANES; j++) lanes[j] = now;
    for (int i = 0; i < BLOCK; i++) lanes[i % LANES] = x[i] > lanes[i % LANES] ? x[i] : lanes[i % LANES];
    for (int j = 0; j < LANES; j++) now = lanes[j] > now ? lanes[j] : now;
    float by = now > *top ? vector_exp(*top - now) : 1, base = now == -INFINITY ? 0 : now;
    for (int i = 0; i < BLOCK; i++) x[i] = vector_exp(x[i] - base);
    for (int j = 0; j < LANES; j++) lanes[j] = 0;
    for (int i = 0; i < BLOCK; i++) lanes[i % LANES] += x[i];
    for (int j = 0; j < LANES; j++) sum += lanes[j];
    *top = now;
    *mass = *mass * by + sum;
    return by;
}

// Returns 0 if a product is not finite.
VECTOR_CLONES static int multiply_row(float *x, float by, uint32_t n)
{
    int bad = 0;
    for (uint32_t i = 0; i < n; i++) {
        x[i] *= by;
        bad |= !(fabsf(x[i]) <= FLT_MAX);
    }
    return !bad;
}

// Returns c->group, or the first query whose output is not finite.
static uint32_t attend_head(const kvb_attend_cache *c, uint32_t head, const float *q, float *out)
{
    strip_memory strip;
    float scores[KVB_ATTEND_GROUP_MAX * BLOCK], top[KVB_ATTEND_GROUP_MAX], mass[KVB_ATTEND_GROUP_MAX], bias[BLOCK];
    float scale = c->scale != 0 ? c->scale : 1 / sqrtf((float)c->head_dim);
    uint32_t d = c->head_dim, length = c->lengths[head], good = 0;
    size_t row;
    memset(out, 0, (size_t)c->group * d * sizeof *out);
    for (uint32_t r = 0; r < c->group; r++) {
        top[r] = c->sinks ? c->sinks[(size_t)head * c->group + r] : -INFINITY;
        mass[r] = c->sinks ? 1 : 0;
    }
    for (uint32_t at = 0, n; at < length; at += n) {
        n = length - at < BLOCK ? length - at : BLOCK;
        for (uint32_t done = 0, rows; done < n; done += rows) {
            rows = rows_together(c, head, at + done, n - done, &row);
            ask_for_rows(c, c->v, head, at + done);
            score_strip(scores + done, q, c->group, rows_widened(c, c->k, row, rows, &strip), rows, d, scale);
            for (uint32_t j = 0; j < rows; j++) bias[done + j] = c->bias ? c->bias[row + j] : 0;
        }
        for (uint32_t j = n; j < BLOCK; j++) bias[j] = -INFINITY;
        for (uint32_t r = 0; r < c->group; r++) {
            float by = weigh_block(scores + r * BLOCK, n, bias, c->softcap, top + r, mass + r);
            if (by != 1) (void)multiply_row(out + (size_t)r * d, by, d);
        }
        for (uint32_t done = 0, rows; done < n; done += rows) {
            rows = rows_together(c, head, at + done, n - done, &row);
            ask_for_rows(c, c->k, head, at + n + done);
            mix_strip(out, scores + done, c->group, rows_widened(c, c->v, row, rows, &strip), rows, d);
        }
    }
    while (good < c->group && multiply_row(out + (size_t)good * d, mass[good] == 0 ? 0 : 1 / mass[good], d)) good++;
    return good;
}

// ---- The call ----

static kvb_status check_shape(const kvb_attend_cache *c, const float *q, uint32_t first, uint32_t last,
                              const float *out, kvb_error *err)
{
    if (!c || !q || !out || !c->k || !c->v || !c->begin || !c->lengths || !c->pages != !c->page_rows)
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_attend: only bias, sinks, err, and pages without page_rows may be NULL");
    if (c->group < 1 || c->group > KVB_ATTEND_GROUP_MAX || c->head_dim < 1 || c->head_dim > KVB_ATTEND_HEAD_DIM_MAX ||
        c->head_dim % LANES || (unsigned)c->format > KVB_ROWS_F16 || !isfinite(c->scale) ||
        !(c->softcap >= 0 && c->softcap <= FLT_MAX) || first > last || last > c->n_heads)
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_attend: group %u, head_dim %u, format %u, scale %g, softcap %g, heads %u to %u of %u: "
                        "expected 1 to %d, a multiple of 8 up to %d, 0 to 2, finite numbers, and heads in order",
                        (unsigned)c->group, (unsigned)c->head_dim, (unsigned)c->format, (double)c->scale,
                        (double)c->softcap, (unsigned)first, (unsigned)last, (unsigned)c->n_heads, KVB_ATTEND_GROUP_MAX,
                        KVB_ATTEND_HEAD_DIM_MAX);
    return KVB_OK;
}

// Checks that a head's rows or pages fit between its `begin` and the next one, and that those lie within k and v.
static kvb_status check_head(const kvb_attend_cache *c, uint32_t head, kvb_error *err)
{
    int64_t begin = c->begin[head], end = c->begin[head + 1], size = c->pages ? c->page_rows : 1;
    int64_t needed = ((int64_t)c->lengths[head] + size - 1) / size, there = (int64_t)(c->n_rows / (uint64_t)size);
    if (begin < 0 || end < begin || needed > end - begin || (!c->pages && end > there))
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_attend: head %u uses %lld %s: expected room for them from begin[%u] to begin[%u], found "
                        "%lld and %lld of %lld",
                        (unsigned)head, (long long)needed, c->pages ? "pages" : "rows", (unsigned)head,
                        (unsigned)head + 1, (long long)begin, (long long)end, (long long)there);
    for (int64_t i = begin; c->pages && i < begin + needed; i++)
        if (c->pages[i] < 0 || c->pages[i] >= there)
            return kvb_fail(err, KVB_ARGUMENT, "kvb_attend: pages[%lld] of head %u: expected 0 to %lld, found %ld",
                            (long long)i, (unsigned)head, (long long)there - 1, (long)c->pages[i]);
    return KVB_OK;
}

kvb_status kvb_attend(const kvb_attend_cache *c, const float *q, uint32_t first, uint32_t last, float *out,
                      kvb_error *err)
{
    kvb_status status = check_shape(c, q, first, last, out, err);
    for (uint32_t h = first; !status && h < last; h++) status = check_head(c, h, err);
    for (uint32_t h = first; !status && h < last; h++) {
        size_t at = (size_t)h * c->group * c->head_dim;
        uint32_t good = attend_head(c, h, q + at, out + at);
        if (good < c->group)
            status = kvb_fail(err, KVB_NUMERIC,
                              "kvb_attend: head %u, query %u of its group: expected a finite output; look for NaN, "
                              "infinity or numbers near 1e38 in query, keys, values and bias",
                              (unsigned)h, (unsigned)good);
    }
    return status;
}
