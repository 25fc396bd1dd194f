// The CPU backend's inner loops, compiled once per vector width; the loader picks.
#include "profiler/backend/cpu_device.h"
#include "profiler/backend/linalg.h"
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

SIMD_CLONES void loop_layer_norm(float *y, const float *x, const float *weight, uint32_t width, float eps)
{
    float mean = 0, square = 0;
#pragma omp simd reduction(+ : mean)
    for (uint32_t c = 0; c < width; c++) mean += x[c];
    mean /= (float)width;
#pragma omp simd reduction(+ : square)
    for (uint32_t c = 0; c < width; c++) square += (x[c] - mean) * (x[c] - mean);
    float scale = 1.0f / sqrtf(square / (float)width + eps);
#pragma omp simd
    for (uint32_t c = 0; c < width; c++) y[c] = (x[c] - mean) * scale * weight[c];
}

SIMD_CLONES void loop_rope(float *y, const float *x, const float *angles, uint32_t heads, uint32_t d, uint32_t rope_dim)
{
    uint32_t half = rope_dim / 2;
    for (uint32_t h = 0; h < heads; h++, x += d, y += d) {
#pragma omp simd
        for (uint32_t p = 0; p < half; p++) {
            float a = x[p], b = x[p + half], c = angles[2 * p], s = angles[2 * p + 1];
            y[p] = a * c - b * s;
            y[p + half] = b * c + a * s;
        }
        for (uint32_t c = rope_dim; c < d; c++) y[c] = x[c];
    }
}

// silu(g) = g / (1 + exp(-g)), with the exponential of a negative number only, so that it cannot overflow.
SIMD_CLONES static void swiglu(float *gate, const float *up, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = gate[i], e = softmax_exp(-fabsf(g));
        gate[i] = g * (g >= 0 ? 1.0f : e) / (1.0f + e) * up[i];
    }
}

// 0.5 g (1 + tanh(u)) = g / (1 + exp(-2 u)) with u = sqrt(2 / pi) (g + 0.044715 g^3); the exponential of a negative
// number only.
SIMD_CLONES static void geglu(float *gate, const float *up, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = gate[i], u = 1.59576912f * (g + 0.044715f * g * g * g), e = softmax_exp(-fabsf(u));
        gate[i] = g * (u >= 0 ? 1.0f : e) / (1.0f + e) * up[i];
    }
}

SIMD_CLONES static void clamped_swiglu(float *gate, const float *up, size_t n)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = gate[i] < 7 ? gate[i] : 7, most = up[i] < 7 ? up[i] : 7, u = most > -7 ? most : -7;
        float e = softmax_exp(-1.702f * fabsf(g));
        gate[i] = g * (g >= 0 ? 1.0f : e) / (1.0f + e) * (u + 1);
    }
}

void loop_glu(float *gate, const float *up, activation act, size_t n)
{
    if (act == SILU) swiglu(gate, up, n);
    else if (act == GELU_TANH) geglu(gate, up, n);
    else clamped_swiglu(gate, up, n);
}

SIMD_CLONES float loop_max(const float *x, size_t n)
{
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (size_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

SIMD_CLONES float loop_exp2_minus(float *e, const float *x, size_t n, float top)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++) {
        float now = softmax_exp2(x[i] - top);
        e[i] = now;
        sum += now;
    }
    return sum;
}

SIMD_CLONES void loop_add_exp2_minus(float *columns, const float *x, size_t n, float top)
{
#pragma omp simd
    for (size_t j = 0; j < n; j++) columns[j] += softmax_exp2(x[j] - top);
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

// tanh(|y|) is (1 - e) / (1 + e) with e = exp(-2 |y|), which cannot overflow; for small y, where that loses digits,
// Cephes' polynomial is used.
SIMD_CLONES void loop_softcap(float *x, size_t n, float cap)
{
    float inverse = 1.0f / cap;
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float y = x[i] * inverse, z = y * y, e = softmax_exp(-2 * fabsf(y)), magnitude = (1 - e) / (1 + e);
        float small = -5.70498872745e-3f;
        small = small * z + 2.06390887954e-2f;
        small = small * z - 5.37397155531e-2f;
        small = small * z + 1.33314422036e-1f;
        small = small * z - 3.33332819422e-1f;
        small = small * z * y + y;
        x[i] = cap * (z < 0.390625f ? small : y < 0 ? -magnitude : magnitude);
    }
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

// Sixteen floats that stay in registers, as many as the processor needs for them, while a loop adds to them.
typedef float lanes __attribute__((vector_size(64)));

// Sums the lanes of each of sixteen vectors at once: every step adds halves and leaves half as many vectors. The sum of
// sum[i] ends up in the lane whose number has i's four bits in reverse order.
#if defined(__GNUC__) && !defined(__clang__)
typedef int lane_places __attribute__((vector_size(64)));
#define ADD_HALVES(n, ...)                                                       \
    for (int i = 0; i < n; i++)                                                  \
    sum[i] = __builtin_shuffle(sum[i], sum[i + n], (lane_places){__VA_ARGS__}) + \
             __builtin_shuffle(sum[i], sum[i + n], (lane_places){__VA_ARGS__} + (int)(n))
static inline __attribute__((always_inline)) void sum_each(lanes *all, lanes sum[16])
{
    ADD_HALVES(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    ADD_HALVES(4, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    ADD_HALVES(2, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
    ADD_HALVES(1, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *all = sum[0];
}
#undef ADD_HALVES
#else
static inline void sum_each(lanes *all, lanes sum[16])
{
    lanes sums = {0};
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) sums[(i & 1) * 8 + (i & 2) * 2 + (i & 4) / 2 + i / 8] += sum[i][j];
    *all = sums;
}
#endif

SIMD_CLONES void loop_tail_scores(float *line, const float *q, const float *k, uint32_t n, uint32_t d, float scale)
{
    static const unsigned char ORDER[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
    for (uint32_t first = 0; first < n; first += 16) {
        const float *rows[16];
        lanes sum[16] = {{0}}, query, row, all;
        uint32_t left = n - first < 16 ? n - first : 16, c = 0;
        for (uint32_t i = 0; i < 16; i++) rows[i] = k + (size_t)(first + (ORDER[i] < left ? ORDER[i] : 0)) * d;
        for (; c + 16 <= d; c += 16) {
            memcpy(&query, q + c, sizeof query);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                memcpy(&row, rows[i] + c, sizeof row);
                sum[i] += query * row;
            }
        }
        for (; c < d; c++)
            for (int i = 0; i < 16; i++) sum[i][0] += q[c] * rows[i][c];
        sum_each(&all, sum);
        all *= scale;
        memcpy(line + first, &all, left * sizeof *line);
    }
}

SIMD_CLONES void loop_weighted_sum(float *out, const float *weights, size_t weight_step, const float *v, size_t ldv,
                                   uint32_t n, uint32_t d)
{
    enum { BLOCK = 4 };
    uint32_t c = 0;
    for (; c + BLOCK * 16 <= d; c += BLOCK * 16) {
        lanes sum[BLOCK], row[BLOCK];
        memcpy(sum, out + c, sizeof sum);
        for (uint32_t t = 0; t < n; t++) {
            memcpy(row, v + t * ldv + c, sizeof row);
            for (int i = 0; i < BLOCK; i++) sum[i] += weights[t * weight_step] * row[i];
        }
        memcpy(out + c, sum, sizeof sum);
    }
    for (; c < d; c++)
        for (uint32_t t = 0; t < n; t++) out[c] += weights[t * weight_step] * v[t * ldv + c];
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

SIMD_CLONES void loop_add_importance(float *sum, const float *e, size_t ld, const float *inverse, const float *w,
                                     size_t ldw, uint32_t group, uint32_t n)
{
    for (uint32_t h = 0; h < group; h++) {
        const float *line = e + h * ld, *weight = w + h * ldw;
        float scale = inverse[h];
#pragma omp simd
        for (uint32_t j = 0; j < n; j++) sum[j] += line[j] * scale * weight[j];
    }
}
