// Sums over a layer that several metrics are made of.
#include "profiler/metric/layer_sums.h"
#include "profiler/backend/linalg.h"
#include "profiler/metric/scorer_parts.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 32, CHUNK = 512 }; // queries whose attention, and keys whose products, are held at a time

static const float *tensor_of(const layer_view *view, view_item item)
{
    return item == VIEW_K ? view->k : view->v;
}

// ---- Attention of a window of queries ----

// Adds the votes of one head; rows [ROWS, T] is scratch.
static void add_votes(float *votes, float *rows, const layer_view *view, uint32_t h, uint32_t window, float factor)
{
    uint32_t T = view->n_tokens;
    for (uint32_t w = 0; w < window; w += ROWS) {
        uint32_t n = window - w < ROWS ? window - w : ROWS;
        attention_rows(rows, view, h, view->n_queries - window + w, n);
        for (uint32_t r = 0; r < n; r++)
            for (uint32_t j = 0; j < T; j++) votes[j] += rows[(size_t)r * T + j] * factor;
    }
}

void layer_window_votes(const layer_view *view, uint32_t window, float factor, float *votes)
{
    uint32_t T = view->n_tokens, H = view->n_heads;
    memset(votes, 0, (size_t)H * T * sizeof *votes);
#pragma omp parallel
    {
        float *rows = need((size_t)(window < ROWS ? window : ROWS) * T, sizeof *rows, "attention weights");
#pragma omp for schedule(dynamic, 1)
        for (uint32_t h = 0; h < H; h++) add_votes(votes + (size_t)h * T, rows, view, h, window, factor);
        free(rows);
    }
}

// Computes the votes of one KV head; sum [ROWS,T] and rows [ROWS,T] are scratch.
static void fuse_group(float *votes, float *sum, float *rows, const layer_view *view, uint32_t g, uint32_t window,
                       bool maximum)
{
    uint32_t T = view->n_tokens;
    memset(votes, 0, T * sizeof *votes);
    for (uint32_t w = 0; w < window; w += ROWS) {
        uint32_t n = window - w < ROWS ? window - w : ROWS;
        group_attention_rows(sum, rows, view, g, view->n_queries - window + w, n);
        for (uint32_t r = 0; r < n; r++) {
            const float *line = sum + (size_t)r * T;
            for (uint32_t j = 0; j < T; j++) votes[j] = maximum ? fmaxf(votes[j], line[j]) : votes[j] + line[j];
        }
    }
}

void layer_group_votes(const layer_view *view, uint32_t window, bool maximum, float *votes)
{
    uint32_t T = view->n_tokens;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t g = 0; g < view->n_kv_heads; g++) {
        float *scratch = need((size_t)2 * ROWS * T, sizeof *scratch, "attention weights");
        fuse_group(votes + (size_t)g * T, scratch, scratch + (size_t)ROWS * T, view, g, window, maximum);
        free(scratch);
    }
}

// ---- Norms and means ----

void layer_norms(const layer_view *view, view_item item, double *norms)
{
    uint32_t d = view->head_dim, n = view->n_kv_heads * view->n_tokens;
    const float *x = tensor_of(view, item);
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++) {
        const float *row = x + (size_t)i * d;
        norms[i] = sqrt(dot_double(row, row, d));
    }
}

SIMD_CLONES static void mean_key(double *mean, const float *k, uint32_t T, uint32_t d, bool normalised)
{
    for (uint32_t c = 0; c < d; c++) mean[c] = 0;
    for (uint32_t j = 0; j < T; j++) {
        const float *key = k + (size_t)j * d;
        double inverse = normalised ? 1.0 / fmax(sqrt(dot_double(key, key, d)), 1e-12) : 1.0;
        for (uint32_t c = 0; c < d; c++) mean[c] += key[c] * inverse;
    }
    for (uint32_t c = 0; c < d; c++) mean[c] /= T;
}

void layer_key_means(const layer_view *view, bool normalised, double *mean)
{
    size_t T = view->n_tokens, d = view->head_dim;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t g = 0; g < view->n_kv_heads; g++)
        mean_key(mean + g * d, view->k + g * T * d, (uint32_t)T, (uint32_t)d, normalised);
}

// Loops over rows of d floats; rows of x are ld apart.
SIMD_CLONES static void add_rows(double *sums, const float *x, size_t ld, uint32_t n, size_t d)
{
    for (uint32_t i = 0; i < n; i++)
        for (size_t c = 0; c < d; c++) sums[c] += x[i * ld + c];
}

SIMD_CLONES static void less_mean(float *rows, const float *x, size_t ld, uint32_t n, const double *mean, size_t d)
{
    for (uint32_t i = 0; i < n; i++)
        for (size_t c = 0; c < d; c++) rows[i * d + c] = (float)(x[i * ld + c] - mean[c]);
}

// rows [CHUNK,d] and product [d,d] are scratch.
static void head_moments(double *mean, double *covariance, float *rows, float *product, const layer_view *view,
                         uint32_t h, uint32_t from)
{
    size_t d = view->head_dim, ld = (size_t)view->n_heads * d;
    uint32_t end = view->n_queries;
    const float *q = view->q_raw + h * d;
    memset(mean, 0, d * sizeof *mean);
    add_rows(mean, q + from * ld, ld, end - from, d);
    for (size_t c = 0; c < d; c++) mean[c] /= end - from;
    if (!covariance) return;
    memset(covariance, 0, d * d * sizeof *covariance);
    for (uint32_t first = from; first < end; first += CHUNK) {
        uint32_t n = end - first < CHUNK ? end - first : CHUNK;
        less_mean(rows, q + first * ld, ld, n, mean, d);
        gemm(true, false, d, d, n, 1.0f, rows, d, rows, d, 0.0f, product, d);
        for (size_t i = 0; i < d * d; i++) covariance[i] += (double)product[i] / (end - from);
    }
}

void layer_query_moments(const layer_view *view, uint32_t from, double *mean, double *covariance)
{
    size_t d = view->head_dim;
    uint32_t hidden = view->n_tokens - view->n_queries, first = from > hidden ? from - hidden : 0;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t h = 0; h < view->n_heads; h++) {
        float *rows = need((CHUNK + d) * d, sizeof *rows, "queries of a head");
        head_moments(mean + h * d, covariance ? covariance + h * d * d : NULL, rows, rows + CHUNK * d, view, h, first);
        free(rows);
    }
}

// ---- Forms in the keys ----

// z [n] = a linear.x + b along.x; along [n,d], or NULL.
SIMD_CLONES static void forms_of_rows(double *z, const float *x, uint32_t n, const double *linear, const float *along,
                                      size_t d, double a, double b)
{
    for (uint32_t i = 0; i < n; i++, x += d) {
        double first = 0, second = along ? dot_double(along + i * d, x, (uint32_t)d) : 0;
#pragma omp simd reduction(+ : first)
        for (size_t c = 0; c < d; c++) first += linear[c] * x[c];
        z[i] = first * a + second * b;
    }
}

// matrix [d,d] and product [CHUNK,d] are scratch, used only if the form has a square.
static void head_forms(double *z, float *matrix, float *product, const layer_view *view, const key_form *form,
                       uint32_t h)
{
    size_t d = view->head_dim, T = view->n_tokens;
    const float *k = view->k + (size_t)(h / (form->n_heads / view->n_kv_heads)) * T * d;
    const double *square = form->square ? form->square + h * d * d : NULL;
    for (size_t i = 0; square && i < d * d; i++) matrix[i] = (float)square[i];
    for (size_t first = 0; first < T; first += CHUNK) {
        size_t n = T - first < CHUNK ? T - first : CHUNK;
        if (square) gemm(false, false, n, d, d, 1.0f, k + first * d, d, matrix, d, 0.0f, product, d);
        forms_of_rows(z + first, k + first * d, (uint32_t)n, form->linear + h * d, square ? product : NULL, d, form->a,
                      form->b);
    }
}

void layer_key_forms(const layer_view *view, const key_form *form, double *z)
{
    size_t d = view->head_dim, T = view->n_tokens;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t h = 0; h < form->n_heads; h++) {
        float *matrix = form->square ? need((CHUNK + d) * d, sizeof *matrix, "keys of a head") : NULL;
        head_forms(z + h * T, matrix, matrix ? matrix + d * d : NULL, view, form, h);
        free(matrix);
    }
}

// ---- LagKV's spreads ----

// low and scale [d]: z' = (z - low) * scale; a constant channel counts as 0.
static void channel_range(float *low, float *scale, const float *ref, uint32_t n_ref, uint32_t d)
{
    memcpy(low, ref, d * sizeof *low);
    memcpy(scale, ref, d * sizeof *scale);
    for (uint32_t j = 1; j < n_ref; j++)
        for (uint32_t c = 0; c < d; c++) {
            float z = ref[(size_t)j * d + c];
            low[c] = z < low[c] ? z : low[c];
            scale[c] = z > scale[c] ? z : scale[c];
        }
    for (uint32_t c = 0; c < d; c++) scale[c] = scale[c] > low[c] ? 1.0f / (scale[c] - low[c]) : 0.0f;
}

SIMD_CLONES static double spread(const float *z, const float *low, const float *scale, float *turned, uint32_t d)
{
    double sum = 0, square = 0;
#pragma omp simd reduction(+ : sum)
    for (uint32_t c = 0; c < d; c++) {
        turned[c] = (z[c] - low[c]) * scale[c];
        sum += turned[c];
    }
    double mean = sum / d;
#pragma omp simd reduction(+ : square)
    for (uint32_t c = 0; c < d; c++) square += (turned[c] - mean) * (turned[c] - mean);
    return sqrt(square / (d > 1 ? d - 1 : 1));
}

void partition_spreads(float *t, const float *z, uint32_t n, const float *ref, uint32_t n_ref, uint32_t d,
                       float *scratch)
{
    float *low = scratch, *scale = scratch + d, *turned = scratch + 2 * (size_t)d;
    channel_range(low, scale, ref, n_ref, d);
    for (uint32_t j = 0; j < n; j++) t[j] = (float)spread(z + (size_t)j * d, low, scale, turned, d);
}

void layer_spreads(const layer_view *view, view_item item, partition_row row, float *out)
{
    size_t T = view->n_tokens, d = view->head_dim;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t g = 0; g < view->n_kv_heads; g++) {
        float *scratch = need(3 * d, sizeof *scratch, "channels");
        for (size_t p = 0; p < row.count; p++) {
            size_t at = g * T + row.first + p * row.size;
            const float *z = tensor_of(view, item) + at * d, *ref = row.own ? z : z + row.size * d;
            partition_spreads(out + at, z, row.size, ref, row.size, (uint32_t)d, scratch);
        }
        free(scratch);
    }
}
