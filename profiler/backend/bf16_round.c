#include "profiler/backend/bf16_round.h"
#include "profiler/backend/linalg.h"
#include "profiler/weights/float_bits.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

// Compilers do not vectorise loops to the bfloat16 instructions, so they are named here. They treat subnormals as zero;
// all else is as in round_by_hand().
#if defined(__x86_64__) && defined(__GNUC__)
#define BF16_UNIT __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

static bool has_bf16_unit(void)
{
    return __builtin_cpu_supports("avx512bf16");
}

BF16_UNIT static size_t round_by_unit(uint16_t *to, const float *x, size_t n, float scale)
{
    size_t i = 0;
    for (__m512 s = _mm512_set1_ps(scale); i + 32 <= n; i += 32) {
        __m512 a = _mm512_mul_ps(_mm512_loadu_ps(x + i), s), b = _mm512_mul_ps(_mm512_loadu_ps(x + i + 16), s);
        _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    return i;
}
#else
#define has_bf16_unit() false
#define round_by_unit(to, x, n, scale) ((size_t)0)
#endif

SIMD_CLONES static void round_by_hand(uint16_t *to, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale;
        uint32_t bits = bits_of_float(value), nearest = bits + 0x7fffu + (bits >> 16 & 1u);
        to[i] = (uint16_t)((value == value ? nearest : bits | 0x00400000u) >> 16);
    }
}

void bf16_round(uint16_t *to, const float *x, size_t n, float scale)
{
    size_t done = has_bf16_unit() ? round_by_unit(to, x, n, scale) : 0;
    round_by_hand(to + done, x + done, n - done, scale);
}
