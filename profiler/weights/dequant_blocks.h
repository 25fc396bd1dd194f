// What the readers of block formats share: loads, and fields that two files unpack (dequant_blocks.c, dequant_steps.c).
#pragma once
#include "profiler/weights/dequant.h"
#include <string.h>

enum { SMALL = 32, SUPER = 256 }; // values per block of the simple and of the K formats

// Expands one block of a format to its values.
typedef void block_reader(const uint8_t *block, float *values);
// NULL for a type that cannot be read.
block_reader *dequant_block_reader(uint32_t type);

static inline uint16_t load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static inline float load_half(const uint8_t *p)
{
    return half_to_float(load_u16(p));
}

// The fifth bits of a Q5_0 or Q5_1 block: bit i belongs to value i.
static inline int fifth_bit(const uint8_t *high, int i)
{
    return (high[i / 8] >> i % 8 & 1) << 4;
}

// The 6-bit scale and minimum of sub-block i < 8 of a Q4_K or Q5_K block, from 12 bytes: sub-blocks 0..3 lie in the
// low six bits of bytes 0..3 and 4..7; those of 4..7 in the nibbles of bytes 8..11, their upper two bits on top of
// the former.
static inline void scale_and_min(const uint8_t *s, int i, int *scale, int *min)
{
    if (i < 4) {
        *scale = s[i] & 63;
        *min = s[i + 4] & 63;
    } else {
        *scale = (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
        *min = s[i + 4] >> 4 | (s[i] >> 6) << 4;
    }
}

// The 4-bit values of IQ4_NL and IQ4_XS, and of MXFP4 (e2m1, doubled).
static inline int nonlinear_value(unsigned nibble)
{
    static const int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return values[nibble];
}

static inline int e2m1_doubled(unsigned nibble)
{
    static const int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return values[nibble];
}

// Half of 2^(e - 127), for doubled values. NaN, which the model's reader refuses, for 255, which is NaN in the standard
// (OCP MX 1.0, 5.4.1), and for 254: no weight is a multiple of 2^126, and most of its values are beyond float32.
static inline float e8m0_half(uint8_t e)
{
    uint32_t bits = e >= 254 ? 0x7fc00000u : e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The step of 32 values, sub-block i < 8, of an IQ4_XS block: d, upper bit pairs of the scales, 4 bytes of lower
// nibbles.
static inline float iq4_xs_step(const uint8_t *b, int i)
{
    int scale = (b[4 + i / 2] >> i % 2 * 4 & 15) | (load_u16(b + 2) >> 2 * i & 3) << 4;
    return load_half(b) * (float)(scale - 32);
}
