#include "profiler/backend/packed_steps.h"
#include "profiler/backend/linalg.h"
#include <string.h>

enum {
    HALF = STEP_COLUMNS / 2,
    LINES = STEP_TERMS / 2, // of half a block: two terms each
    HEAD_BYTES = 2 * STEP_COLUMNS * (int)sizeof(float)
};

static size_t line_bytes(unsigned bits)
{
    return bits == 4 ? HALF : 2 * HALF;
}

size_t steps_block_bytes(unsigned bits)
{
    return HEAD_BYTES + 2 * LINES * line_bytes(bits);
}

// Returns the offset of the block with a column's first terms.
static size_t column_start(unsigned bits, uint32_t column, uint32_t k)
{
    return column / STEP_COLUMNS * (k / STEP_TERMS * steps_block_bytes(bits));
}

void steps_pack(unsigned bits, void *to, uint32_t column, uint32_t k, const int8_t *wholes, const float *steps,
                const float *bases)
{
    uint32_t half = column % STEP_COLUMNS / HALF, place = column % HALF;
    char *block = (char *)to + column_start(bits, column, k);
    for (uint32_t i = 0; i < k / STEP_TERMS; i++, wholes += STEP_TERMS, block += steps_block_bytes(bits)) {
        float *head = (float *)(void *)block + half * 2 * HALF;
        int8_t *line = (int8_t *)block + HEAD_BYTES + half * LINES * line_bytes(bits) + place;
        head[place] = steps[i];
        head[HALF + place] = bases[i];
        for (size_t pair = 0; pair < LINES; pair++, line += line_bytes(bits)) {
            int8_t even = wholes[2 * pair], odd = wholes[2 * pair + 1];
            if (bits == 4) line[0] = (int8_t)((uint8_t)even | (uint8_t)odd << 4);
            else line[0] = even, line[HALF] = odd;
        }
    }
}

// Returns the bits that two cut parts do not hold, or-ed over the terms; 0: they hold all.
SIMD_CLONES static uint32_t third_parts(const int8_t *wholes, float step, float base)
{
    uint32_t left = 0;
    for (size_t i = 0; i < STEP_TERMS; i++) {
        float value = step * (float)wholes[i] + base, top;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        bits &= 0xffff0000u;
        memcpy(&top, &bits, sizeof top);
        value -= top;
        memcpy(&bits, &value, sizeof bits);
        left |= bits << 16;
    }
    return left;
}

bool steps_fit_two_parts(const int8_t *wholes, const float *steps, const float *bases, uint32_t k)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < k / STEP_TERMS; i++) left |= third_parts(wholes + i * STEP_TERMS, steps[i], bases[i]);
    return left == 0;
}

void steps_unpack(unsigned bits, float *to, const void *from, uint32_t column, uint32_t k, uint32_t first, uint32_t n)
{
    uint32_t half = column % STEP_COLUMNS / HALF, place = column % HALF;
    for (uint32_t i = first; i < first + n; i++) {
        const char *block =
            (const char *)from + column_start(bits, column, k) + i / STEP_TERMS * steps_block_bytes(bits);
        const float *head = (const float *)(const void *)block + half * 2 * HALF;
        const int8_t *line =
            (const int8_t *)block + HEAD_BYTES + (half * LINES + i % STEP_TERMS / 2) * line_bytes(bits) + place;
        int whole = bits == 4 ? (uint8_t)line[0] >> i % 2 * 4 & 15 : line[i % 2 * HALF];
        if (bits == 6) *to++ = (float)whole * head[i % STEP_TERMS / (STEP_TERMS / 2) * HALF + place];
        else *to++ = (float)whole * head[place] + head[HALF + place]; // the product is exact
    }
}

// ---- To float32, for oneDNN ----

#ifdef __x86_64__
#include <immintrin.h>
#define WIDE_UNIT __attribute__((target("avx2")))

bool steps_can_widen(void)
{
    return __builtin_cpu_supports("avx2");
}

// Writes a term of 16 columns; base may be NULL.
WIDE_UNIT static inline void widen_term(float *to, __m128i wholes, const float *step, const float *base)
{
    for (size_t i = 0; i < HALF; i += 8, wholes = _mm_srli_si128(wholes, 8)) {
        __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(wholes)), _mm256_loadu_ps(step + i));
        _mm256_storeu_ps(to + i, base ? _mm256_add_ps(x, _mm256_loadu_ps(base + i)) : x);
    }
}

// Writes 32 terms of 16 columns, each term `side` floats behind the one before.
WIDE_UNIT static inline __attribute__((always_inline)) void widen_half(unsigned bits, float *to, size_t side,
                                                                       const int8_t *line, const float *head)
{
    const float *base = bits == 6 ? NULL : head + HALF;
    for (size_t pair = 0; pair < LINES; pair++, line += line_bytes(bits), to += 2 * side) {
        const float *step = bits == 6 && pair >= LINES / 2 ? head + HALF : head;
        const __m128i first = _mm_loadu_si128((const void *)line), low = _mm_set1_epi8(15);
        widen_term(to, bits == 4 ? _mm_and_si128(first, low) : first, step, base);
        widen_term(to + side,
                   bits == 4 ? _mm_and_si128(_mm_srli_epi16(first, 4), low)
                             : _mm_loadu_si128((const void *)(line + HALF)),
                   step, base);
    }
}

WIDE_UNIT void steps_widen(unsigned bits, float *to, const void *from, uint32_t k, uint32_t n, uint32_t side)
{
    size_t bytes = steps_block_bytes(bits);
    for (uint32_t i = 0; i < k; i += STEP_TERMS)
        for (uint32_t column = 0; column < n; column += HALF) {
            const char *block = (const char *)from + column_start(bits, column, k) + i / STEP_TERMS * bytes;
            size_t half = column % STEP_COLUMNS / HALF;
            const float *head = (const float *)(const void *)block + half * 2 * HALF;
            const int8_t *line = (const int8_t *)block + HEAD_BYTES + half * LINES * line_bytes(bits);
            float *at = to + ((size_t)(column / side) * k + i) * side + column % side;
            if (bits == 4) widen_half(4, at, side, line, head);
            else if (bits == 6) widen_half(6, at, side, line, head);
            else widen_half(8, at, side, line, head);
        }
}
#else
bool steps_can_widen(void)
{
    return false;
}

void steps_widen(unsigned bits, float *to, const void *from, uint32_t k, uint32_t n, uint32_t side) {}
#endif

// ---- To bfloat16 parts, for the tile unit ----

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 11)
#include <immintrin.h>
#define VECTOR_UNIT __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { TILE_BYTES = 1024, TILE_LINE = 64 };

typedef struct line_pair {
    __m512 even, odd; // first and second terms of 16 columns
} line_pair;

VECTOR_UNIT ALWAYS_INLINE line_pair load_line(unsigned bits, const char *line, __m512 step, __m512 base)
{
    __m512i even, odd;
    if (bits == 4) {
        __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)line));
        even = _mm512_and_si512(both, _mm512_set1_epi32(15));
        odd = _mm512_srli_epi32(both, 4);
    } else {
        even = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)line));
        odd = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(line + HALF)));
    }
    return (line_pair){_mm512_fmadd_ps(_mm512_cvtepi32_ps(even), step, base),
                       _mm512_fmadd_ps(_mm512_cvtepi32_ps(odd), step, base)};
}

// Returns the upper halves of all values, pairs side by side as in a tile.
VECTOR_UNIT ALWAYS_INLINE __m512i upper_halves(__m512i even, __m512i odd)
{
    return _mm512_mask_mov_epi16(_mm512_srli_epi32(even, 16), 0xaaaaaaaa, odd);
}

// Returns the part that the upper halves of even and odd make, and subtracts it from `x`.
VECTOR_UNIT ALWAYS_INLINE __m512i take_part(line_pair *x, __m512i even, __m512i odd)
{
    const __m512i top = _mm512_set1_epi32((int)0xffff0000);
    __m512i part = upper_halves(even, odd);
    x->even = _mm512_sub_ps(x->even, _mm512_castsi512_ps(_mm512_and_si512(even, top)));
    x->odd = _mm512_sub_ps(x->odd, _mm512_castsi512_ps(_mm512_and_si512(odd, top)));
    return part;
}

VECTOR_UNIT ALWAYS_INLINE __m512i cut(line_pair *x)
{
    return take_part(x, _mm512_castps_si512(x->even), _mm512_castps_si512(x->odd));
}

// Rounds to nearest, ties away from zero, which takes fewer instructions than to even.
VECTOR_UNIT ALWAYS_INLINE __m512i nearest(line_pair *x)
{
    const __m512i half = _mm512_set1_epi32(0x8000);
    return take_part(x, _mm512_add_epi32(_mm512_castps_si512(x->even), half),
                     _mm512_add_epi32(_mm512_castps_si512(x->odd), half));
}

VECTOR_UNIT ALWAYS_INLINE void unfold(unsigned bits, unsigned parts, bool cuts, char *to, const char *block,
                                      size_t first, size_t end)
{
    const char *line = block + HEAD_BYTES + first * line_bytes(bits);
    const size_t run = bits == 6 ? LINES / 2 : LINES; // lines with the same steps
    for (size_t i = first / run; first < end; i++) {
        const float *head = (const float *)(const void *)block + i * run / LINES * 2 * HALF;
        __m512 step = _mm512_loadu_ps(bits == 6 ? head + i % 2 * HALF : head),
               base = bits == 6 ? _mm512_setzero_ps() : _mm512_loadu_ps(head + HALF);
        size_t stop = end < (i + 1) * run ? end : (i + 1) * run;
        for (; first < stop; first++, line += line_bytes(bits)) {
            char *at = to + first / LINES * TILE_BYTES + first % LINES * TILE_LINE;
            line_pair x = load_line(bits, line, step, base);
            for (unsigned part = 0; part < parts; part++, at += 2 * TILE_BYTES)
                _mm512_store_si512(at, cuts ? cut(&x) : nearest(&x));
        }
    }
}

VECTOR_UNIT ALWAYS_INLINE void unfold_as(unsigned bits, step_parts parts, char *to, const char *block, size_t first,
                                         size_t end)
{
    if (parts == PARTS_NEAREST_1) unfold(bits, 1, false, to, block, first, end);
    else if (parts == PARTS_NEAREST_2) unfold(bits, 2, false, to, block, first, end);
    else unfold(bits, parts == PARTS_CUT_2 ? 2 : 3, true, to, block, first, end);
}

VECTOR_UNIT void steps_unfold(unsigned bits, step_parts parts, char *to, const char *block, size_t first, size_t end)
{
    if (bits == 4) unfold_as(4, parts, to, block, first, end);
    else if (bits == 6) unfold_as(6, parts, to, block, first, end);
    else unfold_as(8, parts, to, block, first, end);
}
#else // never called: there is no tile unit
void steps_unfold(unsigned bits, step_parts parts, char *to, const char *block, size_t first, size_t end) {}
#endif
