// What loops that vectorise share: a copy of a function for each kind of processor, and the exponential.
#pragma once
#include <math.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && \
    !defined(__SANITIZE_ADDRESS__)
#define VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTOR_CLONES
#endif

typedef float vector __attribute__((vector_size(32))); // GCC's and Clang's, on every processor

// exp(x) for -87 <= x <= 87, to about 1e-7; below that 0, above it exp(87), and NaN for NaN.
static inline float vector_exp(float x)
{
    union {
        float f;
        uint32_t u;
    } power;
    float c = x < -87 ? -87 : x;
    c = c > 87 ? 87 : c;
    float whole = c * 1.44269504f + 12582912.0f; // adding 1.5 * 2^23 rounds to an integer
    power.f = whole;
    whole -= 12582912.0f;
    float r = (c - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    power.u = (power.u + 127u) << 23;
    return x < -87 ? 0 : p * power.f;
}
