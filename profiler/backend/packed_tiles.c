#include "profiler/backend/packed_tiles.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/packed_steps.h"
#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 11)
#include "profiler/backend/tile_unit.h"

// A tile has 16 rows of 64 bytes. A tile of a holds 16 rows of 32 terms; a tile of b holds 16 pairs of terms of 16
// columns, the two of a pair side by side. a is stored as [row blocks][term blocks][parts] tiles, b as [pairs of column
// blocks][term blocks][parts][2] tiles, so that a product walks through both from front to back. Three parts take half
// as many bytes again as the float32 that they come from, and decoding is limited by memory: with three parts b stays
// float32, in the order of its tiles, and is split when the first rows are multiplied.
enum {
    TERMS = 32,
    COLUMNS = 32,
    TILE_BYTES = 1024,
    LINE = 64,
    LINES = 32, // of a block of terms of a pair of column blocks
    SPLIT_PARTS = 3,
    SPLIT_BYTES = 2 * SPLIT_PARTS * TILE_BYTES
};

static inline size_t blocks_of(size_t n, size_t each)
{
    return (n + each - 1) / each;
}

// Returns the stored bytes of one block of terms of a pair of column blocks of b.
static inline size_t b_block_bytes(unsigned parts)
{
    return parts == SPLIT_PARTS ? TERMS * COLUMNS * sizeof(float) : parts * 2 * TILE_BYTES;
}

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

// Writes 32 values as the same line of three tiles that are `step` bytes apart. The first part is rounded, so that the
// rest has either sign; the others are cut, 8 bits each, and hold all of the rest. Cutting takes half the instructions
// of rounding.
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

// The same for `parts` tiles; one or two parts are rounded to even on ties.
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

// Returns where row `row` of a begins.
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
    __m512 top[4] = {least, least, least, least}; // four, so that none waits for another
    uint32_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 4; j++) top[j] = _mm512_max_ps(_mm512_loadu_ps(x + i + 16 * j), top[j]);
    for (int j = 0; i < n; i += 16, j++) {
        __mmask16 there = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : 0xffff;
        top[j] = _mm512_max_ps(_mm512_mask_loadu_ps(least, there, x + i), top[j]);
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
}

// Computes softmax_exp2 (linalg.h) in the lanes of the mask `there`, 0 in the others.
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

// Writes 32 terms of a line, zeros outside the mask `there`.
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
    if (transposed && terms == TERMS) { // pairs of terms are side by side in memory too
        for (uint32_t j = 0; j < columns; j++)
            for (uint32_t pair = 0; pair < TERMS / 2; pair++)
                memcpy(tile + pair * 32 + 2 * j, b + j * ld + 2 * pair, 2 * sizeof *tile);
        return;
    }
    for (uint32_t i = 0; i < terms; i++)
        for (uint32_t j = 0; j < columns; j++) tile[i / 2 * 32 + 2 * j + i % 2] = b[i * term_step + j * column_step];
}

// Stores a tile with the first terms of its pairs, and then the second ones, in each line, as split_lines reads them.
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

// ---- Products ----

enum { AHEAD_BLOCKS = 6 }; // decoding waits for b's memory, which is prefetched this many blocks of terms ahead
enum { TERM_BLOCKS = 24 }; // at a time: a block of columns of b and many rows of a stay in the second-level cache

// Splits lines [first, end) of the 32 of one float32 block of b into parts. They are cut, not rounded, which takes
// fewer instructions: 8 bits at a time hold all 24. What a product leaves out is no larger for it on average, since
// what the first part of a leaves has either sign.
TILE_UNIT static inline __attribute__((always_inline)) void split_lines(char *to, const float *b, size_t first,
                                                                        size_t end)
{
    const __m512i top = _mm512_set1_epi32((int)0xffff0000);
    for (size_t i = first; i < end; i++) {
        char *line = to + i / 16 * TILE_BYTES + i % 16 * LINE;
        __m512 even = _mm512_loadu_ps(b + i * 32), odd = _mm512_loadu_ps(b + i * 32 + 16);
        for (int part = 0; part < SPLIT_PARTS; part++, line += 2 * TILE_BYTES) {
            __m512i high_even = _mm512_and_si512(_mm512_castps_si512(even), top),
                    high_odd = _mm512_and_si512(_mm512_castps_si512(odd), top);
            _mm512_store_si512(line, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), high_odd));
            even = _mm512_sub_ps(even, _mm512_castsi512_ps(high_even));
            odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(high_odd));
        }
    }
}

// Registers: 0-3 c, two by two blocks; 4, 5 a's blocks of rows; 6, 7 b's blocks of columns.
#define LOAD_A(part)                                                         \
    do {                                                                     \
        tile_load(4, a + (part - 1) * TILE_BYTES, LINE);                     \
        if (two) tile_load(5, a + row_step + (part - 1) * TILE_BYTES, LINE); \
    } while (0)
#define LOAD_B(part)                                                      \
    do {                                                                  \
        tile_load(6, b + (part - 1) * 2 * TILE_BYTES, LINE);              \
        tile_load(7, b + (part - 1) * 2 * TILE_BYTES + TILE_BYTES, LINE); \
    } while (0)
#define MULTIPLY()                  \
    do {                            \
        tile_multiply(0, 4, 6);     \
        tile_multiply(1, 4, 7);     \
        if (two) {                  \
            tile_multiply(2, 5, 6); \
            tile_multiply(3, 5, 7); \
        }                           \
    } while (0)

// What the parts of a block of terms of b are made from, and where they go; `from` is NULL if none are to be made.
typedef struct unfolding {
    const char *from;
    char *to;
    unsigned bits;
    step_parts parts;
} unfolding;

TILE_UNIT static inline __attribute__((always_inline)) void unfold_lines(const unfolding *u, size_t first, size_t end)
{
    if (!u->from) return;
    if (u->bits) steps_unfold(u->bits, u->parts, u->to, u->from, first, end);
    else split_lines(u->to, (const float *)(const void *)u->from, first, end);
}

// Multiplies one block of terms, small products first if that costs no further loads. The parts of the next block are
// made a few lines at a time between the products, during which the vector units are idle.
TILE_UNIT static inline __attribute__((always_inline)) void multiply_terms(unsigned parts, unsigned b_parts, bool two,
                                                                           const char *a, size_t row_step,
                                                                           const char *b, const unfolding *next)
{
    if (parts == 3) {
        LOAD_A(3);
        LOAD_B(1);
        MULTIPLY();
        unfold_lines(next, 0, 6);
        LOAD_A(2);
        MULTIPLY();
        unfold_lines(next, 6, 12);
        LOAD_B(2);
        MULTIPLY();
        unfold_lines(next, 12, 18);
        LOAD_A(1);
        MULTIPLY();
        unfold_lines(next, 18, 25);
        if (b_parts == 3) {
            LOAD_B(3);
            MULTIPLY();
        }
        unfold_lines(next, 25, 32);
        LOAD_B(1);
        MULTIPLY();
    } else if (parts == 2) {
        LOAD_A(2);
        LOAD_B(1);
        MULTIPLY();
        unfold_lines(next, 0, 8);
        LOAD_B(2);
        MULTIPLY();
        unfold_lines(next, 8, 16);
        LOAD_A(1);
        MULTIPLY();
        unfold_lines(next, 16, 24);
        LOAD_B(1);
        MULTIPLY();
        unfold_lines(next, 24, 32);
    } else {
        LOAD_A(1);
        LOAD_B(1);
        MULTIPLY();
        unfold_lines(next, 0, 32);
    }
}

// The operands of one block of c: `count` blocks of terms of one or two blocks of rows of a, and of a pair of blocks of
// columns of b. If the parts of b have to be made first, they go to `made`, and `b` is `made`.
typedef struct tile_block {
    const char *a, *b;
    char *made;
    size_t row_step;     // bytes between blocks of rows of a
    unfolding unfolding; // of the first block of terms
    size_t unfold_step;  // bytes to the next one that is unfolded
    bool once;           // the parts are not used again
    uint32_t rows, count;
    bool accumulate;
    bool add; // the finished sums are added to c
} tile_block;

TILE_UNIT static inline __attribute__((always_inline)) void store_tiles(bool two, float *c, size_t ldc)
{
    size_t line = ldc * sizeof *c;
    tile_store(0, c, line);
    tile_store(1, c + 16, line);
    if (two) {
        tile_store(2, c + TILE_ROWS * ldc, line);
        tile_store(3, c + TILE_ROWS * ldc + 16, line);
    }
}

TILE_UNIT static void add_lines(float *c, size_t ldc, const float *sums, uint32_t rows)
{
    for (uint32_t r = 0; r < rows; r++, c += ldc, sums += COLUMNS)
        for (int j = 0; j < COLUMNS; j += 16)
            _mm512_storeu_ps(c + j, _mm512_add_ps(_mm512_loadu_ps(c + j), _mm512_load_ps(sums + j)));
}

// c [16 or 32 rows, 32 columns], lines ldc floats apart, (+)= a b.
TILE_UNIT static inline __attribute__((always_inline)) void multiply_block(unsigned parts, unsigned b_parts, bool two,
                                                                           const tile_block *t, float *c, size_t ldc)
{
    size_t line = ldc * sizeof *c, a_step = parts * TILE_BYTES, b_step = b_parts * 2 * TILE_BYTES;
    const char *a = t->a, *b = t->b;
    if (t->accumulate) {
        tile_load(0, c, line);
        tile_load(1, c + 16, line);
        if (two) {
            tile_load(2, c + TILE_ROWS * ldc, line);
            tile_load(3, c + TILE_ROWS * ldc + 16, line);
        }
    } else {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    }
    uint32_t i = 0;
    unfolding next = t->unfolding;
    if (next.from) {
        unfold_lines(&next, 0, LINES);
        for (; i + 1 < t->count; i++, a += a_step) {
            next.from += t->unfold_step;
            for (size_t ahead = 0; ahead < t->unfold_step; ahead += LINE)
                _mm_prefetch(next.from + AHEAD_BLOCKS * t->unfold_step + ahead, _MM_HINT_T0);
            next.to = t->once && i % 2 ? t->made : next.to + b_step;
            multiply_terms(parts, b_parts, two, a, t->row_step, b, &next);
            b = next.to;
        }
    }
    next.from = NULL;
    for (; i < t->count; i++, a += a_step, b += b_step) multiply_terms(parts, b_parts, two, a, t->row_step, b, &next);
    if (t->add) {
        _Alignas(LINE) float sums[2 * TILE_ROWS * COLUMNS];
        store_tiles(two, sums, COLUMNS);
        add_lines(c, ldc, sums, t->rows);
    } else {
        store_tiles(two, c, ldc);
    }
}

TILE_UNIT static void multiply_any(unsigned parts, unsigned b_parts, bool two, const tile_block *t, float *c,
                                   size_t ldc)
{
    if (two && parts == 3 && b_parts == 3) multiply_block(3, 3, true, t, c, ldc);
    else if (two && parts == 3) multiply_block(3, 2, true, t, c, ldc);
    else if (two && parts == 2) multiply_block(2, 2, true, t, c, ldc);
    else if (two) multiply_block(1, 1, true, t, c, ldc);
    else if (parts == 3 && b_parts == 3) multiply_block(3, 3, false, t, c, ldc);
    else if (parts == 3) multiply_block(3, 2, false, t, c, ldc);
    else if (parts == 2) multiply_block(2, 2, false, t, c, ldc);
    else multiply_block(1, 1, false, t, c, ldc);
}

// Multiplies a block of columns that extends beyond the edge of c, in a buffer.
TILE_UNIT static void multiply_edge(unsigned parts, unsigned b_parts, uint32_t rows, const tile_block *t, float *c,
                                    size_t ldc, uint32_t columns)
{
    float whole[2 * TILE_ROWS * COLUMNS];
    for (uint32_t r = 0; (t->accumulate || t->add) && r < rows; r++)
        memcpy(whole + r * COLUMNS, c + r * ldc, columns * sizeof *c);
    multiply_any(parts, b_parts, rows > TILE_ROWS, t, whole, COLUMNS);
    for (uint32_t r = 0; r < rows; r++) memcpy(c + r * ldc, whole + r * COLUMNS, columns * sizeof *c);
}

// How the thread's unit is configured.
static _Thread_local struct {
    uint32_t rows; // 0: not at all
    bool held;
} unit;

// Configures the unit for two blocks of rows in its registers with `rows` rows together: others are neither read nor
// written.
TILE_UNIT static void set_rows(uint32_t rows)
{
    if (rows == unit.rows) return;
    unit.rows = rows;
    uint8_t first = rows < TILE_ROWS ? (uint8_t)rows : TILE_ROWS,
            second = rows > TILE_ROWS ? (uint8_t)(rows - TILE_ROWS) : TILE_ROWS;
    tile_setting setting = {.palette = 1, .rows = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS}};
    for (int i = 0; i < 8; i++) setting.bytes[i] = LINE;
    tile_configure(&setting);
}

TILE_UNIT static void unit_off(void)
{
    if (unit.rows) tile_release();
    unit.rows = 0;
}

void tiles_hold(void)
{
    unit.held = true;
}

void tiles_let_go(void)
{
    unit.held = false;
    unit_off();
}

static step_parts unfolded_parts(const tile_product *p)
{
    if (p->parts == 3) return p->b_parts == 2 ? PARTS_CUT_2 : PARTS_CUT_3;
    return p->parts == 2 ? PARTS_NEAREST_2 : PARTS_NEAREST_1;
}

// Multiplies all rows with a block of columns, over `count` blocks of terms from `first` on. `made`: where parts of b
// are made, unless the product has its own place for them.
TILE_UNIT static void multiply_columns(const tile_product *p, uint32_t column, uint32_t first, uint32_t count,
                                       char *made)
{
    if (p->split) made = (char *)p->split + (column / COLUMNS * blocks_of(p->k, TERMS) + first) * SPLIT_BYTES;
    size_t stored = p->bits ? steps_block_bytes(p->bits) : b_block_bytes(p->parts);
    bool ready = !p->bits && p->parts != SPLIT_PARTS;
    const char *b = (const char *)p->b + (column / COLUMNS * blocks_of(p->k, TERMS) + first) * stored;
    tile_block t = {.b = ready ? b : made,
                    .made = made,
                    .row_step = tiles_a_bytes(p->parts, TILE_ROWS, p->k),
                    .unfolding = {ready || p->is_split ? NULL : b, made, p->bits, unfolded_parts(p)},
                    .unfold_step = stored,
                    .once = p->m <= 2 * TILE_ROWS && !p->split,
                    .count = count,
                    .accumulate = !p->add && (p->accumulate || first > 0),
                    .add = p->add};
    uint32_t columns = p->n - column < COLUMNS ? p->n - column : COLUMNS;
    for (uint32_t row = 0; row < p->m; row += 2 * TILE_ROWS, t.unfolding.from = NULL) {
        uint32_t rows = p->m - row < 2 * TILE_ROWS ? p->m - row : 2 * TILE_ROWS;
        float *c = p->c + (size_t)row * p->ldc + column;
        t.rows = rows;
        uint32_t needed = rows % TILE_ROWS ? rows : 2 * TILE_ROWS; // one configuration for all whole blocks
        set_rows(needed);
        t.a = (const char *)p->a + row / TILE_ROWS * t.row_step + (size_t)first * p->parts * TILE_BYTES;
        if (columns == COLUMNS) multiply_any(p->parts, p->b_parts, rows > TILE_ROWS, &t, c, p->ldc);
        else multiply_edge(p->parts, p->b_parts, rows, &t, c, p->ldc, columns);
    }
}

TILE_UNIT void tiles_multiply(const tile_product *p)
{
    _Alignas(LINE) char made[TERM_BLOCKS * SPLIT_BYTES];
    uint32_t term_blocks = (uint32_t)blocks_of(p->terms ? p->terms : p->k, TERMS);
    for (uint32_t first = 0; first < term_blocks; first += TERM_BLOCKS)
        for (uint32_t column = 0; column < p->n; column += COLUMNS)
            multiply_columns(p, column, first, term_blocks - first < TERM_BLOCKS ? term_blocks - first : TERM_BLOCKS,
                             made);
    if (!unit.held) unit_off();
}

#else // no tile unit: tiles_available says so, and nobody calls the others

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

void tiles_pack_b(unsigned parts, void *to, const float *b, size_t ld, bool transposed, uint32_t k, uint32_t n) {}

void tiles_pack_row(unsigned parts, void *to, const float *x, uint32_t row, uint32_t k, float scale) {}

size_t tiles_split_bytes(unsigned parts, uint32_t k, uint32_t n)
{
    return 0;
}

float tiles_max(const float *x, uint32_t n)
{
    return 0;
}

float tiles_exp2_row(unsigned parts, void *to, uint32_t row, uint32_t k, const float *x, uint32_t n, uint32_t terms,
                     float top, float *keep)
{
    return 0;
}

void tiles_hold(void) {}

void tiles_let_go(void) {}

void tiles_multiply(const tile_product *p) {}
#endif
