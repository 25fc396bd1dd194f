// The bits of a float32 as a number, and back.
#pragma once
#include <stdint.h>

static inline float float_of_bits(uint32_t bits)
{
    union {
        uint32_t u;
        float f;
    } v = {bits};
    return v.f;
}

static inline uint32_t bits_of_float(float value)
{
    union {
        float f;
        uint32_t u;
    } v = {value};
    return v.u;
}
