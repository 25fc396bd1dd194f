#include "profiler/backend/packed_tiles.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/tile_layout.h"
#include <math.h>
#include <string.h>

#if TILE_UNIT_BUILT

bool tiles_available(void)
{
    static int known; // 0 not yet, 1 no, 2 yes
    if (!known) known = tile_unit_found() ? 2 : 1;
    return known == 2;
}

size_t tiles_b_bytes(unsigned parts, uint32_t k, uint32_t n)
{
    return blocks_of(n, COLUMNS) * blocks_of(k, TERMS) * b_block_bytes(parts);
}

size_t tiles_split_bytes(unsigned parts, uint32_t k, uint32_t n)
{
    return parts == SPLIT_PARTS ? blocks_of(n, COLUMNS) * blocks_of(k, TERMS) * SPLIT_BYTES : 0;
}

size_t tiles_a_bytes(unsigned parts, uint32_t m, uint32_t k)
{
    return blocks_of(m, TILE_ROWS) * blocks_of(k, TERMS) * parts * TILE_BYTES;
}

TILE_UNIT static inline __m512 widen(__m256i bf16)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

// 32 values as the same line of three tiles that are `step` bytes apart. The first part is rounded, so that what is
// left has either sign; the others are cut: parts of 8 bits each hold all of it. Cutting takes half the instructions of
// rounding.
TILE_UNIT static inline void store_three(char *to, size_t step, __m512 a, __m512 b)
{
    static const _Alignas(LINE) uint16_t UPPER[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i top = _mm512_set1_epi32((int)0xffff0000), half = _mm512_set1_epi32(0x8000),
                  upper = _mm512_load_si512(UPPER);
    __m512i high_a = _mm512_add_epi32(_mm512_castps_si512(a), half),
            high_b = _mm512_add_epi32(_mm512_castps_si512(b), half);
    for (int i = 0; i < 3; i++, to += step) {
        _mm512_store_si512(to, _mm512_permutex2var_epi16(high_a, upper, high_b));
        a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(high_a, top)));
        b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_and_si512(high_b, top)));
        high_a = _mm512_castps_si512(a);
        high_b = _mm512_castps_si512(b);
    }
}

// The same of `parts` tiles.
TILE_UNIT static inline __attribute__((always_inline)) void store_line(unsigned parts, char *to, size_t step, __m512 a,
                                                                       __m512 b)
{
    if (parts == 3) {
        store_three(to, step, a, b);
        return;
    }
    for (unsigned i = 1;; i++, to += step) {
        __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        _mm512_store_si512(to, rounded);
        if (i == parts) return;
        a = _mm512_sub_ps(a, widen(_mm512_castsi512_si256(rounded)));
        b = _mm512_sub_ps(b, widen(_mm512_extracti64x4_epi64(rounded, 1)));
    }
}

// Where row `row` of a operand begins.
static char *line_of_row(unsigned parts, void *a, uint32_t row, uint32_t k)
{
    return (char *)a + row / TILE_ROWS * tiles_a_bytes(parts, TILE_ROWS, k) + row % TILE_ROWS * LINE;
}

TILE_UNIT static inline __attribute__((always_inline)) void pack_terms(unsigned parts, char *line, const float *x,
                                                                       uint32_t k, float scale)
{
    __m512 s = _mm512_set1_ps(scale);
    uint32_t i = 0;
    for (; i + TERMS <= k; i += TERMS, line += parts * TILE_BYTES)
        store_line(parts, line, TILE_BYTES, _mm512_mul_ps(_mm512_loadu_ps(x + i), s),
                   _mm512_mul_ps(_mm512_loadu_ps(x + i + 16), s));
    if (i == k) return;
    float rest[TERMS] = {0};
    memcpy(rest, x + i, (k - i) * sizeof *x);
    store_line(parts, line, TILE_BYTES, _mm512_mul_ps(_mm512_loadu_ps(rest), s),
               _mm512_mul_ps(_mm512_loadu_ps(rest + 16), s));
}

TILE_UNIT void tiles_pack_row(unsigned parts, void *to, const float *x, uint32_t row, uint32_t k, float scale)
{
    char *line = line_of_row(parts, to, row, k);
    if (parts == 3) pack_terms(3, line, x, k, scale);
    else if (parts == 2) pack_terms(2, line, x, k, scale);
    else pack_terms(1, line, x, k, scale);
}

TILE_UNIT float tiles_max(const float *x, uint32_t n)
{
    const __m512 least = _mm512_set1_ps(-INFINITY);
    __m512 top[4] = {least, least, least, least}; // so that one need not wait for the other
    uint32_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 4; j++) top[j] = _mm512_max_ps(_mm512_loadu_ps(x + i + 16 * j), top[j]);
    for (int j = 0; i < n; i += 16, j++) {
        __mmask16 there = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : 0xffff;
        top[j] = _mm512_max_ps(_mm512_mask_loadu_ps(least, there, x + i), top[j]);
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
}

// softmax_exp2 (linalg.h) of the lanes that are `there`, 0 in the others.
TILE_UNIT static inline __m512 exp2_lanes(__m512 x, __mmask16 there)
{
    const __m512 shifter = _mm512_set1_ps(EXP2_SHIFTER);
    __m512 n = _mm512_add_ps(x, shifter), r = _mm512_sub_ps(x, _mm512_sub_ps(n, shifter));
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(EXP2_TERM_6), r, _mm512_set1_ps(EXP2_TERM_5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2_TERM_4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2_TERM_3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2_TERM_2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP2_TERM_1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    there = _mm512_mask_cmp_ps_mask(there, x, _mm512_set1_ps(EXP2_LEAST), _CMP_GE_OQ);
    return _mm512_castsi512_ps(
        _mm512_maskz_add_epi32(there, _mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}

// 32 terms of a line, those that are `there`.
TILE_UNIT static inline __attribute__((always_inline)) void
exp2_block(unsigned parts, char *line, const float *x, __m512 top, uint32_t there, __m512 sums[2], float *keep)
{
    __m512 a = exp2_lanes(_mm512_sub_ps(_mm512_loadu_ps(x), top), (__mmask16)there),
           b = exp2_lanes(_mm512_sub_ps(_mm512_loadu_ps(x + 16), top), (__mmask16)(there >> 16));
    sums[0] = _mm512_add_ps(sums[0], a);
    sums[1] = _mm512_add_ps(sums[1], b);
    store_line(parts, line, TILE_BYTES, a, b);
    if (!keep) return;
    _mm512_storeu_ps(keep, a);
    _mm512_storeu_ps(keep + 16, b);
}

TILE_UNIT static inline __attribute__((always_inline)) float
exp2_terms(unsigned parts, char *line, const float *x, uint32_t n, uint32_t terms, float top, float *keep)
{
    const __m512 subtract = _mm512_set1_ps(top);
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    uint32_t i = 0;
    for (; i + TERMS <= n; i += TERMS, line += parts * TILE_BYTES)
        exp2_block(parts, line, x + i, subtract, 0xffffffff, sums, keep ? keep + i : NULL);
    for (; i < terms; i += TERMS, line += parts * TILE_BYTES)
        exp2_block(parts, line, x + i, subtract, i < n ? (1u << (n - i)) - 1 : 0, sums, keep ? keep + i : NULL);
    return _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
}

TILE_UNIT float tiles_exp2_row(unsigned parts, void *to, uint32_t row, uint32_t k, const float *x, uint32_t n,
                               uint32_t terms, float top, float *keep)
{
    char *line = line_of_row(parts, to, row, k);
    return parts == 3   ? exp2_terms(3, line, x, n, terms, top, keep)
           : parts == 2 ? exp2_terms(2, line, x, n, terms, top, keep)
                        : exp2_terms(1, line, x, n, terms, top, keep);
}

// Gathers one tile of b in float32: terms from `term` on, columns from `column` on, zeros beyond k and n.
static void gather_tile(float *tile, const float *b, size_t ld, bool transposed, uint32_t term, uint32_t column,
                        uint32_t k, uint32_t n)
{
    uint32_t terms = k - term < TERMS ? k - term : TERMS, columns = n - column < 16 ? n - column : 16;
    size_t term_step = transposed ? 1 : ld, column_step = transposed ? ld : 1;
    if (terms < TERMS || columns < 16) memset(tile, 0, TERMS * 16 * sizeof *tile);
    b += term * term_step + column * column_step;
    if (transposed && terms == TERMS) { // pairs of terms stand side by side in memory too
        for (uint32_t j = 0; j < columns; j++)
            for (uint32_t pair = 0; pair < TERMS / 2; pair++)
                memcpy(tile + pair * 32 + 2 * j, b + j * ld + 2 * pair, 2 * sizeof *tile);
        return;
    }
    for (uint32_t i = 0; i < terms; i++)
        for (uint32_t j = 0; j < columns; j++) tile[i / 2 * 32 + 2 * j + i % 2] = b[i * term_step + j * column_step];
}

// A tile with the first terms of its pairs, and then the second ones, in each line: as split_lines wants them.
static void store_apart(float *to, const float *tile)
{
    for (size_t line = 0; line < 16; line++, to += 32, tile += 32)
        for (size_t j = 0; j < 16; j++) to[j] = tile[2 * j], to[16 + j] = tile[2 * j + 1];
}

TILE_UNIT void tiles_pack_b(unsigned parts, void *to, const float *b, size_t ld, bool transposed, uint32_t k,
                            uint32_t n)
{
    float tile[TERMS * 16];
    char *at = to;
    for (uint32_t column = 0; column < n; column += COLUMNS)
        for (uint32_t term = 0; term < k; term += TERMS, at += b_block_bytes(parts))
            for (uint32_t half = 0; half < 2; half++) {
                if (column + 16 * half < n) gather_tile(tile, b, ld, transposed, term, column + 16 * half, k, n);
                else memset(tile, 0, sizeof tile);
                if (parts == SPLIT_PARTS) {
                    store_apart((float *)(void *)(at + half * sizeof tile), tile);
                    continue;
                }
                for (size_t line = 0; line < 16; line++)
                    store_line(parts, at + half * TILE_BYTES + line * LINE, 2 * TILE_BYTES,
                               _mm512_loadu_ps(tile + line * 32), _mm512_loadu_ps(tile + line * 32 + 16));
            }
}

#else // nothing of the kind: tiles_available says so, and nobody calls the others

bool tiles_available(void)
{
    return false;
}

size_t tiles_b_bytes(unsigned parts, uint32_t k, uint32_t n)
{
    return (size_t)parts * k * n;
}

size_t tiles_a_bytes(unsigned parts, uint32_t m, uint32_t k)
{
    return (size_t)parts * m * k;
}

void tiles_pack_b(unsigned parts, void *to, const float *b, size_t ld, bool transposed, uint32_t k, uint32_t n)
{
    (void)parts, (void)to, (void)b, (void)ld, (void)transposed, (void)k, (void)n;
}

void tiles_pack_row(unsigned parts, void *to, const float *x, uint32_t row, uint32_t k, float scale)
{
    (void)parts, (void)to, (void)x, (void)row, (void)k, (void)scale;
}

size_t tiles_split_bytes(unsigned parts, uint32_t k, uint32_t n)
{
    (void)parts, (void)k, (void)n;
    return 0;
}

float tiles_max(const float *x, uint32_t n)
{
    (void)x, (void)n;
    return 0;
}

float tiles_exp2_row(unsigned parts, void *to, uint32_t row, uint32_t k, const float *x, uint32_t n, uint32_t terms,
                     float top, float *keep)
{
    (void)parts, (void)to, (void)row, (void)k, (void)x, (void)n, (void)terms, (void)top, (void)keep;
    return 0;
}
#endif
