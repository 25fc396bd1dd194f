// The CPU backend's inner loops, compiled once per vector width; the loader picks.
#include "profiler/backend_cpu.h"
#include "profiler/linalg.h"
#include <math.h>
#include <string.h>

SIMD_CLONES void loop_rms_norm(float *y, const float *x, const float *weight, uint32_t width, float eps)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (uint32_t c = 0; c < width; c++) sum += x[c] * x[c];
    float scale = 1.0f / sqrtf(sum / (float)width + eps);
#pragma omp simd
    for (uint32_t c = 0; c < width; c++) y[c] = x[c] * scale * weight[c];
}

// silu(g) = g / (1 + exp(-g)), with the exponential of a negative number only, so that it cannot overflow.
SIMD_CLONES void loop_swiglu(float *gate, const float *up, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = gate[i], e = softmax_exp(-fabsf(g));
        gate[i] = g * (g >= 0 ? 1.0f : e) / (1.0f + e) * up[i];
    }
}

SIMD_CLONES float loop_max(const float *x, size_t n)
{
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (size_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

SIMD_CLONES float loop_exp_minus(float *x, size_t n, float top)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) {
        float e = softmax_exp(x[i] - top);
        x[i] = e;
        sum += e;
    }
    return sum;
}

SIMD_CLONES void loop_add_exp_minus(float *columns, const float *x, size_t n, float top)
{
#pragma omp simd
    for (size_t j = 0; j < n; j++) columns[j] += softmax_exp(x[j] - top);
}

SIMD_CLONES float loop_dot(const float *a, const float *b, size_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

SIMD_CLONES void loop_scale(float *x, size_t n, float factor)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

SIMD_CLONES float loop_absolute_sum(const float *x, size_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += fabsf(x[i]);
    return sum;
}

SIMD_CLONES void loop_store_tile(float *y, size_t ldy, const float *tile, uint32_t rows, uint32_t width,
                                 bool accumulate)
{
    for (uint32_t r = 0; r < rows; r++, y += ldy, tile += width) {
        if (accumulate) {
#pragma omp simd
            for (uint32_t c = 0; c < width; c++) y[c] += tile[c];
        } else {
            memcpy(y, tile, width * sizeof *y);
        }
    }
}

SIMD_CLONES void loop_tail_scores(float *line, const float *q, const float *k, uint32_t n, uint32_t d, float scale)
{
    for (uint32_t t = 0; t < n; t++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (uint32_t c = 0; c < d; c++) sum += q[c] * k[(size_t)t * d + c];
        line[t] = sum * scale;
    }
}

SIMD_CLONES void loop_tail_values(float *out, const float *weights, const float *v, uint32_t n, uint32_t d)
{
    for (uint32_t t = 0; t < n; t++) {
        float weight = weights[t];
#pragma omp simd
        for (uint32_t c = 0; c < d; c++) out[c] += weight * v[(size_t)t * d + c];
    }
}

SIMD_CLONES void loop_raise_importance(float *best, const float *e, size_t ld, const float *inverse, const float *w,
                                       size_t ldw, uint32_t group, uint32_t n)
{
    for (uint32_t h = 0; h < group; h++) {
        const float *line = e + h * ld, *weight = w + h * ldw;
        float scale = inverse[h];
#pragma omp simd
        for (uint32_t j = 0; j < n; j++) {
            float importance = line[j] * scale * weight[j];
            best[j] = importance > best[j] ? importance : best[j];
        }
    }
}
