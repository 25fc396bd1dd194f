#include "profiler/backend/bf16_parts.h"
#include "profiler/backend/linalg.h"
#include "profiler/weights/float_bits.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

// Returns the nearest bfloat16 as the float32 with the same value.
static inline float round_bf16(float x)
{
    uint32_t bits = bits_of_float(x), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    return float_of_bits(x == x ? rounded : bits | 0x00400000u);
}

static inline uint16_t bf16_bits(float rounded)
{
    return (uint16_t)(bits_of_float(rounded) >> 16);
}

SIMD_CLONES void parts_high(float *high, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) high[i] = round_bf16(x[i] * scale);
}

SIMD_CLONES void parts_high_low(float *high, float *low, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale, top = round_bf16(value);
        high[i] = top;
        low[i] = round_bf16(value - top);
    }
}

SIMD_CLONES void parts_three(float *high, float *middle, float *low, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale, top = round_bf16(value), rest = value - top, next = round_bf16(rest);
        high[i] = top;
        middle[i] = next;
        low[i] = round_bf16(rest - next);
    }
}

SIMD_CLONES void parts_three_bits(uint16_t *high, uint16_t *middle, uint16_t *low, const float *x, size_t n,
                                  float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale, top = round_bf16(value), rest = value - top, next = round_bf16(rest);
        high[i] = bf16_bits(top);
        middle[i] = bf16_bits(next);
        low[i] = bf16_bits(round_bf16(rest - next));
    }
}

// Compilers do not vectorise loops to the bfloat16 instructions, so they are named here. They treat subnormals as zero;
// all else is as above.
#if defined(__x86_64__) && defined(__GNUC__)
#define BF16_UNIT __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

static bool has_bf16_unit(void)
{
    return __builtin_cpu_supports("avx512bf16");
}

BF16_UNIT static size_t high_bits_by_unit(uint16_t *high, const float *x, size_t n, float scale)
{
    size_t i = 0;
    for (__m512 s = _mm512_set1_ps(scale); i + 32 <= n; i += 32) {
        __m512 a = _mm512_mul_ps(_mm512_loadu_ps(x + i), s), b = _mm512_mul_ps(_mm512_loadu_ps(x + i + 16), s);
        _mm512_storeu_si512(high + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    return i;
}

BF16_UNIT static size_t high_low_bits_by_unit(uint16_t *high, uint16_t *low, const float *x, size_t n, float scale)
{
    size_t i = 0;
    for (__m512 s = _mm512_set1_ps(scale); i + 16 <= n; i += 16) {
        __m512 a = _mm512_mul_ps(_mm512_loadu_ps(x + i), s);
        __m256i top = (__m256i)_mm512_cvtneps_pbh(a);
        __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(top), 16));
        _mm256_storeu_si256((void *)(high + i), top);
        _mm256_storeu_si256((void *)(low + i), (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(a, back)));
    }
    return i;
}
#else
#define has_bf16_unit() false
#define high_bits_by_unit(high, x, n, scale) ((size_t)0)
#define high_low_bits_by_unit(high, low, x, n, scale) ((size_t)0)
#endif

SIMD_CLONES static void high_bits_by_hand(uint16_t *high, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) high[i] = bf16_bits(round_bf16(x[i] * scale));
}

SIMD_CLONES static void high_low_bits_by_hand(uint16_t *high, uint16_t *low, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale, top = round_bf16(value);
        high[i] = bf16_bits(top);
        low[i] = bf16_bits(round_bf16(value - top));
    }
}

void parts_high_bits(uint16_t *high, const float *x, size_t n, float scale)
{
    size_t done = has_bf16_unit() ? high_bits_by_unit(high, x, n, scale) : 0;
    high_bits_by_hand(high + done, x + done, n - done, scale);
}

void parts_high_low_bits(uint16_t *high, uint16_t *low, const float *x, size_t n, float scale)
{
    size_t done = has_bf16_unit() ? high_low_bits_by_unit(high, low, x, n, scale) : 0;
    high_low_bits_by_hand(high + done, low + done, x + done, n - done, scale);
}
