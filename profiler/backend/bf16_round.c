#include "profiler/backend/bf16_round.h"
#include "profiler/backend/linalg.h"
#include "profiler/weights/float_bits.h"

SIMD_CLONES void bf16_round(uint16_t *to, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale;
        uint32_t bits = bits_of_float(value), nearest = bits + 0x7fffu + (bits >> 16 & 1u);
        to[i] = (uint16_t)((value == value ? nearest : bits | 0x00400000u) >> 16);
    }
}
