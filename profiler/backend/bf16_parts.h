// The bfloat16 parts of float32 numbers that packed.c multiplies, each rounded to nearest, ties to even:
//
//     high = bf16(x)    middle = bf16(x - high)    low = bf16(x - high - middle)
//
// or, of two parts, low = bf16(x - high). Numbers that overflow become infinite, NaN stays NaN. x [n] is multiplied by
// `scale` first. Parts are written as the float32 with the same value, or as the 16 bits alone.
#pragma once
#include <stddef.h>
#include <stdint.h>

void parts_high(float *high, const float *x, size_t n, float scale);
void parts_high_low(float *high, float *low, const float *x, size_t n, float scale);
void parts_three(float *high, float *middle, float *low, const float *x, size_t n, float scale);

// On processors with bfloat16 instructions the first two may treat subnormals as zero.
void parts_high_bits(uint16_t *high, const float *x, size_t n, float scale);
void parts_high_low_bits(uint16_t *high, uint16_t *low, const float *x, size_t n, float scale);
void parts_three_bits(uint16_t *high, uint16_t *middle, uint16_t *low, const float *x, size_t n, float scale);
