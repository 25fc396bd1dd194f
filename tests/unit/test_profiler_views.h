// Layers as scorers see them, drawn at random, and computations that the scorers' tests share.
#pragma once
#include "test_profiler_cases.h"

typedef struct shape {
    uint32_t H, G, d;
} shape;

static const shape SHAPES[] = {{4, 4, 16}, {9, 3, 8}, {6, 1, 32}, {1, 1, 2}, {8, 2, 64}};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };

static inline void rotate(double *out, const float *in, uint32_t d, const float *frequency, double at)
{
    for (uint32_t p = 0; p < d / 2; p++) {
        double c = cos(at * frequency[p]), s = sin(at * frequency[p]), a = in[p], b = in[p + d / 2];
        out[p] = a * c - b * s;
        out[p + d / 2] = b * c + a * s;
    }
}

// Queries and keys as a model has them: an offset common to all, some spread, RoPE on top; values of different lengths.
static inline layer_view view_make(shape s, uint32_t T, double spread)
{
    float *frequency = case_alloc(s.d / 2, sizeof *frequency), *offset = case_floats((size_t)(s.H + s.G) * s.d, 1, 0);
    float *q_raw = case_floats((size_t)T * s.H * s.d, spread, 0), *q = case_alloc((size_t)T * s.H * s.d, sizeof *q);
    float *k = case_floats((size_t)s.G * T * s.d, spread, 0), *v = case_floats((size_t)s.G * T * s.d, 1, 0.3);
    double *row = case_alloc(s.d, sizeof *row);
    for (uint32_t p = 0; p < s.d / 2; p++) frequency[p] = (float)pow(10000, -2.0 * p / s.d);
    for (size_t i = 0; i < (size_t)T * s.H; i++) {
        for (uint32_t c = 0; c < s.d; c++) q_raw[i * s.d + c] += offset[i % s.H * s.d + c];
        rotate(row, q_raw + i * s.d, s.d, frequency, (double)(i / s.H));
        for (uint32_t c = 0; c < s.d; c++) q[i * s.d + c] = (float)row[c];
    }
    for (size_t i = 0; i < (size_t)s.G * T; i++) {
        for (uint32_t c = 0; c < s.d; c++) k[i * s.d + c] += offset[(s.H + i / T) * s.d + c];
        rotate(row, k + i * s.d, s.d, frequency, (double)(i % T));
        for (uint32_t c = 0; c < s.d; c++) k[i * s.d + c] = (float)row[c];
    }
    free(offset);
    free(row);
    return (layer_view){.n_tokens = T,
                        .n_heads = s.H,
                        .n_kv_heads = s.G,
                        .head_dim = s.d,
                        .rope_dim = s.d,
                        .rope_frequency = frequency,
                        .q_raw = q_raw,
                        .q = q,
                        .k = k,
                        .v = v,
                        .n_queries = T};
}

static inline void view_free(layer_view *v)
{
    const float *all[] = {v->rope_frequency, v->q_raw, v->q, v->k, v->v};
    for (int i = 0; i < 5; i++) free((void *)(uintptr_t)all[i]);
}

static inline const float *key_of(const layer_view *v, uint32_t g, uint32_t j)
{
    return v->k + ((size_t)g * v->n_tokens + j) * v->head_dim;
}

static inline double dot(const float *a, const float *b, uint32_t d)
{
    double sum = 0;
    for (uint32_t c = 0; c < d; c++) sum += (double)a[c] * b[c];
    return sum;
}

static inline void softmax(double *z, uint32_t n)
{
    double top = -INFINITY, sum = 0;
    for (uint32_t j = 0; j < n; j++) top = fmax(top, z[j]);
    for (uint32_t j = 0; j < n; j++) sum += z[j] = exp(z[j] - top);
    for (uint32_t j = 0; j < n; j++) z[j] /= sum;
}

static inline void compare(const char *text, const layer_view *v, const float *want, double tolerance)
{
    float *got = case_score(text, v);
    double error = case_row_error(got, want, v->n_kv_heads, v->n_tokens);
    ck_assert_msg(error <= tolerance, "%s: T %u, H %u, G %u, d %u: relative error %g, at most %g", text, v->n_tokens,
                  v->n_heads, v->n_kv_heads, v->head_dim, error, tolerance);
    free(got);
}
