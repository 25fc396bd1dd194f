#include "profiler/backend/packed_steps.h"
#include "profiler/backend/packed_tiles.h"
#include "profiler/backend/tile_layout.h"
#include <string.h>

#if TILE_UNIT_BUILT

enum { AHEAD_BLOCKS = 6 }; // what decoding waits for is b's memory: it is asked for so many blocks of terms ahead
enum { TERM_BLOCKS = 24 }; // at a time: a block of columns of b and many rows of a stay in the second-level cache

// Lines [first, end) of the 32 of one block of b in float32, as parts. They are cut, not rounded, which takes fewer
// instructions: 8 bits at a time hold all 24. What a product then leaves out is no larger for it on average, since a's
// parts are rounded to either side.
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

// Where the parts of a block of terms of b are made from, and where they go; nothing where `from` is NULL.
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

// One block of terms: small products first where that costs no further loading. The parts of the next block are made a
// few lines at a time between the products, which the vector units have nothing else to do for.
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

// What meets one block of c: `count` blocks of terms of one or two blocks of rows of a, and of a pair of blocks of
// columns of b. Where the parts of b have to be made first, they go to `made`, which is `b` then.
typedef struct tile_block {
    const char *a, *b;
    char *made;
    size_t row_step;     // bytes between blocks of rows of a
    unfolding unfolding; // of the first block of terms
    size_t unfold_step;  // bytes to the next one that is unfolded
    bool once;           // nobody will meet the parts again
    uint32_t rows, count;
    bool accumulate;
    bool add; // c is added to what stands there when it is complete
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

// Where a block of columns hangs over the edge of c it is made beside it.
TILE_UNIT static void multiply_edge(unsigned parts, unsigned b_parts, uint32_t rows, const tile_block *t, float *c,
                                    size_t ldc, uint32_t columns)
{
    float whole[2 * TILE_ROWS * COLUMNS];
    for (uint32_t r = 0; (t->accumulate || t->add) && r < rows; r++)
        memcpy(whole + r * COLUMNS, c + r * ldc, columns * sizeof *c);
    multiply_any(parts, b_parts, rows > TILE_ROWS, t, whole, COLUMNS);
    for (uint32_t r = 0; r < rows; r++) memcpy(c + r * ldc, whole + r * COLUMNS, columns * sizeof *c);
}

// What the thread's unit has been told.
static _Thread_local struct {
    uint32_t rows; // 0: nothing
    bool held;
} unit;

// Tells the unit that the two blocks of rows in its registers have `rows` rows together: others are neither read nor
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

// All rows of a block of columns, of `count` blocks of terms from `first` on. `made`: where parts of b are made, unless
// the product has its own place for them.
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
        uint32_t needed = rows % TILE_ROWS ? rows : 2 * TILE_ROWS; // whole blocks are all set alike
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

#else // as in packed_tiles.c: nobody calls them

void tiles_hold(void) {}

void tiles_let_go(void) {}

void tiles_multiply(const tile_product *p)
{
    (void)p;
}
#endif
