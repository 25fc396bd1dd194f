// Attention of one decode step over heads that keep different numbers of rows. kvbudget.h has the contract.
// The rows are read once, in order, a block at a time; what a query has seen so far is a maximum, a sum and the
// output (online softmax, arXiv 1805.02867). So nothing grows with the cache, and time follows the rows. A strip of
// rows serves all queries of the group before the next one is read.
#include "fail.h"
#include "vector.h"
#include <float.h>
#include <string.h>

enum { BLOCK = 32, STRIP = 8, LANES = 8, TILE = 4 };
#define INLINE static inline __attribute__((always_inline)) // into the copy for each processor

// ---- Strips of rows ----

VECTOR_CLONES static void widen_bf16(float *to, const uint16_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

// Shifted into place, the exponent is too small by 112; a product mends that, of subnormal numbers too.
VECTOR_CLONES static void widen_f16(float *to, const uint16_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t half = from[i], bits = (half & 0x7fffu) << 13;
        float size;
        memcpy(&size, &bits, sizeof bits);
        size *= 0x1p112f;
        memcpy(&bits, &size, sizeof bits);
        bits |= (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0;
        bits |= (half & 0x8000u) << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

// n rows as floats: in place, or widened into `strip`.
static const float *rows_widened(const kvb_attend_cache *c, const void *rows, size_t row, uint32_t n, float *strip)
{
    size_t at = row * c->head_dim, count = (size_t)n * c->head_dim;
    if (c->format == KVB_ROWS_F32) return (const float *)rows + at;
    (c->format == KVB_ROWS_BF16 ? widen_bf16 : widen_f16)(strip, (const uint16_t *)rows + at, count);
    return strip;
}

// Rows that lie side by side from a head's row `at` on, at most `most`; *row is the first one's number in k and v.
static uint32_t rows_together(const kvb_attend_cache *c, uint32_t head, uint32_t at, uint32_t most, size_t *row)
{
    size_t begin = (size_t)c->begin[head];
    if (most > STRIP) most = STRIP;
    *row = begin + at;
    if (!c->page_rows) return most;
    size_t page = begin + at / c->page_rows;
    uint32_t inside = at % c->page_rows, left = c->page_rows - inside;
    *row = (c->pages ? (size_t)c->pages[page] : page) * c->page_rows + inside;
    return left < most ? left : most;
}

// Asks for rows ahead: pages lie anywhere, which a processor cannot guess.
static void ask_for_rows(const kvb_attend_cache *c, const void *rows, uint32_t head, uint32_t at)
{
    size_t row, size = (c->format == KVB_ROWS_F32 ? 4 : 2) * (size_t)c->head_dim;
    if (at >= c->lengths[head]) return;
    uint32_t n = rows_together(c, head, at, c->lengths[head] - at, &row);
    const char *from = (const char *)rows + row * size;
    for (size_t i = 0; i < n * size; i += 64)
        __builtin_prefetch(from + i, 0, 2); // into the second cache, which has room
}

// Row i of a tile. Those behind the last row are that row again, and what comes of them is left out.
INLINE const float *tile_row(const float *rows, uint32_t i, uint32_t n, uint32_t d)
{
    return rows + (size_t)(i < n ? i : n - 1) * d;
}

INLINE void score_tile(float *scores, const float *q, int queries, const float *k, uint32_t at, uint32_t n, uint32_t d,
                       float scale)
{
    vector s[2][TILE] = {{{0}}};
    const float *rows[TILE];
    uint32_t c = 0;
    for (uint32_t i = 0; i < TILE; i++) rows[i] = tile_row(k, at + i, n, d);
    for (; c + LANES <= d; c += LANES)
#pragma GCC unroll 4
        for (int i = 0; i < TILE; i++) {
            vector x, y;
            memcpy(&y, rows[i] + c, sizeof y);
#pragma GCC unroll 2
            for (int r = 0; r < queries; r++) {
                memcpy(&x, q + (size_t)r * d + c, sizeof x);
                s[r][i] += x * y;
            }
        }
    for (int r = 0; r < queries; r++)
        for (uint32_t i = 0; i < TILE && at + i < n; i++) {
            float sum = 0;
            for (uint32_t e = c; e < d; e++) sum += q[(size_t)r * d + e] * rows[i][e];
            vector x = s[r][i];
            sum += ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
            scores[(size_t)r * BLOCK + at + i] = sum * scale;
        }
}

VECTOR_CLONES static void score_strip(float *scores, const float *q, uint32_t group, const float *k, uint32_t n,
                                      uint32_t d, float scale)
{
    for (uint32_t at = 0; at < n; at += TILE) {
        uint32_t r = 0;
        for (; r + 2 <= group; r += 2) score_tile(scores + r * BLOCK, q + (size_t)r * d, 2, k, at, n, d, scale);
        if (r < group) score_tile(scores + r * BLOCK, q + (size_t)r * d, 1, k, at, n, d, scale);
    }
}

// o += weights of TILE rows times the rows.
INLINE void mix_tile(float *o, const float *weights, int queries, const float *v, uint32_t at, uint32_t n, uint32_t d)
{
    const float *rows[TILE];
    float w[2][TILE] = {{0}};
    uint32_t c = 0;
    for (uint32_t i = 0; i < TILE; i++) rows[i] = tile_row(v, at + i, n, d);
    for (int r = 0; r < queries; r++)
        for (uint32_t i = 0; i < TILE && at + i < n; i++) w[r][i] = weights[(size_t)r * BLOCK + at + i];
    for (; c + LANES <= d; c += LANES) {
        vector sum[2];
#pragma GCC unroll 2
        for (int r = 0; r < queries; r++) memcpy(&sum[r], o + (size_t)r * d + c, sizeof *sum);
#pragma GCC unroll 4
        for (int i = 0; i < TILE; i++) {
            vector y;
            memcpy(&y, rows[i] + c, sizeof y);
#pragma GCC unroll 2
            for (int r = 0; r < queries; r++) sum[r] += w[r][i] * y;
        }
#pragma GCC unroll 2
        for (int r = 0; r < queries; r++) memcpy(o + (size_t)r * d + c, &sum[r], sizeof *sum);
    }
    for (int r = 0; r < queries; r++)
        for (uint32_t e = c; e < d; e++)
            for (int i = 0; i < TILE; i++) o[(size_t)r * d + e] += w[r][i] * rows[i][e];
}

VECTOR_CLONES static void mix_strip(float *o, const float *weights, uint32_t group, const float *v, uint32_t n,
                                    uint32_t d)
{
    for (uint32_t at = 0; at < n; at += TILE) {
        uint32_t r = 0;
        for (; r + 2 <= group; r += 2) mix_tile(o + (size_t)r * d, weights + r * BLOCK, 2, v, at, n, d);
        if (r < group) mix_tile(o + (size_t)r * d, weights + r * BLOCK, 1, v, at, n, d);
    }
}

// ---- One query's block ----

// tanh(x) = 1 - 2 / (exp(2 x) + 1); NaN stays NaN
VECTOR_CLONES static void cap_scores(float *x, float cap)
{
    for (int i = 0; i < BLOCK; i++) x[i] = cap * (1 - 2 / (vector_exp(x[i] * (2 / cap)) + 1));
}

// scores [BLOCK] become weights relative to the new maximum. Returns what the sum and output of before are to be
// multiplied with. A maximum of -INFINITY (nothing seen, or nothing that counts) leaves weights of 0.
VECTOR_CLONES static float weigh_block(float *x, float *top, float *mass)
{
    float lanes[LANES], now = *top, sum = 0;
    for (int j = 0; j < LANES; j++) lanes[j] = now;
    for (int i = 0; i < BLOCK; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (int j = 0; j < LANES; j++) now = lanes[j] > now ? lanes[j] : now;
    float by = now > *top ? vector_exp(*top - now) : 1, base = now == -INFINITY ? 0 : now;
    for (int j = 0; j < LANES; j++) lanes[j] = 0;
    for (int i = 0; i < BLOCK; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += x[i + j] = vector_exp(x[i + j] - base);
    for (int j = 0; j < LANES; j++) sum += lanes[j];
    *top = now;
    *mass = *mass * by + sum;
    return by;
}

// Returns 0 where a product is not finite.
VECTOR_CLONES static int multiply_row(float *x, float by, uint32_t n)
{
    int bad = 0;
    for (uint32_t i = 0; i < n; i++) {
        x[i] *= by;
        bad |= !(fabsf(x[i]) <= FLT_MAX);
    }
    return !bad;
}

// ---- Heads ----

// The scores of one block of a head's rows, [group, BLOCK]; -INFINITY behind the last row.
static void score_block(const kvb_attend_cache *c, uint32_t head, uint32_t at, uint32_t n, const float *q,
                        float *scores, float *strip)
{
    float scale = c->scale != 0 ? c->scale : 1 / sqrtf((float)c->head_dim);
    size_t row;
    for (uint32_t done = 0, rows; done < n; done += rows) {
        rows = rows_together(c, head, at + done, n - done, &row);
        ask_for_rows(c, c->v, head, at + done);
        score_strip(scores + done, q, c->group, rows_widened(c, c->k, row, rows, strip), rows, c->head_dim, scale);
    }
    for (uint32_t r = 0; r < c->group; r++) {
        for (uint32_t j = n; j < BLOCK; j++) scores[r * BLOCK + j] = 0;
        if (c->softcap > 0) cap_scores(scores + r * BLOCK, c->softcap);
        for (uint32_t j = n; j < BLOCK; j++) scores[r * BLOCK + j] = -INFINITY;
    }
    for (uint32_t done = 0, rows; c->bias && done < n; done += rows) {
        rows = rows_together(c, head, at + done, n - done, &row);
        for (uint32_t r = 0; r < c->group; r++)
            for (uint32_t j = 0; j < rows; j++) scores[r * BLOCK + done + j] += c->bias[row + j];
    }
}

// Returns c->group, or the first query whose output is not finite.
static uint32_t attend_head(const kvb_attend_cache *c, uint32_t head, const float *q, float *out)
{
    float strip[STRIP * KVB_ATTEND_HEAD_DIM_MAX], scores[KVB_ATTEND_GROUP_MAX * BLOCK], top[KVB_ATTEND_GROUP_MAX],
        mass[KVB_ATTEND_GROUP_MAX];
    uint32_t d = c->head_dim, length = c->lengths[head], good = 0;
    size_t row;
    memset(out, 0, (size_t)c->group * d * sizeof *out);
    for (uint32_t r = 0; r < c->group; r++) {
        top[r] = c->sinks ? c->sinks[(size_t)head * c->group + r] : -INFINITY;
        mass[r] = c->sinks ? 1 : 0;
    }
    for (uint32_t at = 0, n; at < length; at += n) {
        n = length - at < BLOCK ? length - at : BLOCK;
        score_block(c, head, at, n, q, scores, strip);
        for (uint32_t r = 0; r < c->group; r++) {
            float by = weigh_block(scores + r * BLOCK, top + r, mass + r);
            if (by != 1) (void)multiply_row(out + (size_t)r * d, by, d);
        }
        for (uint32_t done = 0, rows; done < n; done += rows) {
            rows = rows_together(c, head, at + done, n - done, &row);
            ask_for_rows(c, c->k, head, at + n + done);
            mix_strip(out, scores + done, c->group, rows_widened(c, c->v, row, rows, strip), rows, d);
        }
    }
    while (good < c->group && multiply_row(out + (size_t)good * d, mass[good] == 0 ? 0 : 1 / mass[good], d)) good++;
    return good;
}

static kvb_status check_shape(const kvb_attend_cache *c, const float *q, uint32_t first, uint32_t last,
                              const float *out, kvb_error *err)
{
    if (!c || !q || !out || !c->k || !c->v || !c->begin || !c->lengths)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_attend: only bias, sinks, pages and err may be NULL");
    if (c->group < 1 || c->group > KVB_ATTEND_GROUP_MAX || c->head_dim < 1 || c->head_dim > KVB_ATTEND_HEAD_DIM_MAX)
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_attend: expected groups of 1 to %d and 1 to %d numbers, found %u and %u",
                        KVB_ATTEND_GROUP_MAX, KVB_ATTEND_HEAD_DIM_MAX, (unsigned)c->group, (unsigned)c->head_dim);
    if ((unsigned)c->format > KVB_ROWS_F16 || !isfinite(c->scale) || !(c->softcap >= 0 && c->softcap <= FLT_MAX))
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_attend: expected format 0 to 2, a finite scale and a softcap from 0 on, found %u, %g and "
                        "%g",
                        (unsigned)c->format, (double)c->scale, (double)c->softcap);
    if (first > last || last > c->n_heads || (c->pages && !c->page_rows))
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_attend: expected first <= last <= %u and page_rows with pages, found %u, %u and %u",
                        (unsigned)c->n_heads, (unsigned)first, (unsigned)last, (unsigned)c->page_rows);
    return KVB_OK;
}

// A head's rows, or its pages, lie within its place, and that within k and v.
static kvb_status check_head(const kvb_attend_cache *c, uint32_t head, kvb_error *err)
{
    int64_t begin = c->begin[head], end = c->begin[head + 1], size = c->page_rows ? c->page_rows : 1;
    int64_t needed = ((int64_t)c->lengths[head] + size - 1) / size, there = (int64_t)(c->n_rows / (uint64_t)size);
    const char *what = c->page_rows ? "pages" : "rows";
    if (begin < 0 || end < begin || needed > end - begin || (!c->pages && end > there))
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_attend: head %u has %lld %s in use: expected begin[%u] and begin[%u] with room for them "
                        "and at most %lld, found %lld and %lld",
                        (unsigned)head, (long long)needed, what, (unsigned)head, (unsigned)head + 1, (long long)there,
                        (long long)begin, (long long)end);
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
