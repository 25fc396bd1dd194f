// Rounds scale * x [n] to bfloat16, to nearest, ties to even, for products on bfloat16 instructions. Numbers that
// overflow become infinite, NaN stays NaN.
#pragma once
#include <stddef.h>
#include <stdint.h>

void bf16_round(uint16_t *to, const float *x, size_t n, float scale);
