// Matrix products on host memory by oneDNN, which picks the kernel for this machine's vector units at run time.
#pragma once
#include "profiler/weights/simd.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// oneDNN changes its order of summation when it is given fewer rows than this (measured on AVX-512: from 16 rows on,
// every row has the same bits whatever the number of rows, columns and threads). Callers whose results must not depend
// on the batch pad to it.
enum { GEMM_MIN_ROWS = 16 };

// C [m,n] = alpha * op(A) op(B) + beta * C, row-major, op(A) [m,k], op(B) [k,n]; trans_x says that X is stored
// transposed. Runs on all OpenMP threads, or on the caller's alone inside a parallel region.
void gemm(bool trans_a, bool trans_b, size_t m, size_t n, size_t k, float alpha, const float *a, size_t lda,
          const float *b, size_t ldb, float beta, float *c, size_t ldc);

// Functions that kernels of a GPU share with the host.
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// exp(x) of the softmaxes, for x <= 0: about 1e-7 relative error, 0 below -87. Inline, so that the loops around it
// vectorise.
HOST_DEVICE static inline float softmax_exp(float x)
{
    const float shifter = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, which is in the low mantissa bits
    float clamped = x > -87.0f ? x : -87.0f;
    float n = clamped * 1.44269504f + shifter;
    union {
        float f;
        unsigned u;
    } bits = {n};
    n -= shifter;
    float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f; // ln 2 in two pieces, the first exact in few bits
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    bits.u = (bits.u + 127u) << 23 & -(unsigned)(x >= -87.0f); // a mask: cheaper than a choice between results
    return p * bits.f;
}

// 2^x of attention's softmax, for x <= 0: 1e-7 relative error, 0 below EXP2_LEAST. Attention multiplies its queries by
// log2(e), which saves most of what the exponential above does besides its polynomial. The tile unit's kernel has the
// same terms.
#define EXP2_SHIFTER 12582912.0f
#define EXP2_LEAST (-125.0f)
#define EXP2_TERM_1 0.69314720f
#define EXP2_TERM_2 0.24022648f
#define EXP2_TERM_3 5.5503324e-2f
#define EXP2_TERM_4 9.6184374e-3f
#define EXP2_TERM_5 1.3398875e-3f
#define EXP2_TERM_6 1.5353362e-4f
static inline float softmax_exp2(float x)
{
    union {
        float f;
        unsigned u;
    } n = {x + EXP2_SHIFTER}, p;
    float r = x - (n.f - EXP2_SHIFTER);
    p.f = EXP2_TERM_6;
    p.f = p.f * r + EXP2_TERM_5;
    p.f = p.f * r + EXP2_TERM_4;
    p.f = p.f * r + EXP2_TERM_3;
    p.f = p.f * r + EXP2_TERM_2;
    p.f = p.f * r + EXP2_TERM_1;
    p.f = p.f * r + 1.0f;
    p.u = (p.u + (n.u << 23)) & -(unsigned)(x >= EXP2_LEAST); // the sum of the bits multiplies by 2^n
    return p.f;
}
