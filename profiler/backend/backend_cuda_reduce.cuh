// Kernels of the reductions that scorers ask for in the place of a layer's tensors (backend.h).
#pragma once
#include "profiler/backend/backend_cuda_attention.cuh"
#include "profiler/backend/backend_cuda_rows.cuh"

// out[i] = ||x_i||, a warp per row.
static __global__ void norms_kernel(float *out, const float *x, size_t n, uint32_t width)
{
    size_t row = thread_index() / WARP;
    if (row >= n) return; // whole warps, and no barrier
    double sum = 0.0;
    for (uint32_t c = threadIdx.x % WARP; c < width; c += WARP) {
        double value = (double)x[row * width + c];
        sum += value * value;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) out[row] = (float)sqrt(sum);
}

// Rows of heads: row i of head h is at x + h * head + i * step; n of them.
struct head_rows {
    const float *x;
    size_t head, step;
    uint32_t n, d;
};

static constexpr uint32_t MEAN_SPANS = 64; // partial sums of each mean

// partial[h, span, c] = sum of a span's rows, each divided by its norm (norms [heads, n]; NULL: by 1). Block (x, y):
// span x of head y.
static __global__ void mean_spans_kernel(double *partial, head_rows rows, const float *norms)
{
    uint32_t h = blockIdx.y, span = (rows.n + MEAN_SPANS - 1) / MEAN_SPANS, from = blockIdx.x * span;
    uint32_t to = from + span < rows.n ? from + span : rows.n;
    for (uint32_t c = threadIdx.x; c < rows.d; c += blockDim.x) {
        double sum = 0.0;
        for (uint32_t i = from; i < to; i++) {
            double share = norms ? 1.0 / fmax((double)norms[(size_t)h * rows.n + i], 1e-12) : 1.0;
            sum += (double)rows.x[h * rows.head + i * rows.step + c] * share;
        }
        partial[((size_t)h * MEAN_SPANS + blockIdx.x) * rows.d + c] = sum;
    }
}

// One block per head.
static __global__ void mean_kernel(float *mean, const double *partial, uint32_t n, uint32_t d)
{
    for (uint32_t c = threadIdx.x; c < d; c += blockDim.x) {
        double sum = 0.0;
        for (uint32_t span = 0; span < MEAN_SPANS; span++)
            sum += partial[((size_t)blockIdx.x * MEAN_SPANS + span) * d + c];
        mean[(size_t)blockIdx.x * d + c] = (float)(sum / n);
    }
}

static constexpr uint32_t COVARIANCE_SPAN = 512; // rows that are summed in float32 before they join a sum in double

// covariance[h] [d, d], divisor n: block (x, y) has tile x of head y's matrix.
static __global__ void __launch_bounds__(TILE_THREADS)
    covariance_kernel(float *covariance, const float *mean, head_rows rows)
{
    __shared__ tile_memory shared;
    uint32_t d = rows.d, tiles = (d + TILE - 1) / TILE, h = blockIdx.y, t = threadIdx.x, tx = t % 16, ty = t / 16;
    uint32_t row0 = blockIdx.x / tiles * TILE, column0 = blockIdx.x % tiles * TILE;
    float *a = (float *)shared.operands, *b = a + TILE_DEPTH * TILE_LINE;
    double sum[4][4] = {};
    for (uint32_t from = 0; from < rows.n; from += COVARIANCE_SPAN) {
        uint32_t end = at_most(rows.n, from + COVARIANCE_SPAN);
        float s[4][4];
        clear_scores(s);
        for (uint32_t at = from; at < end; at += TILE_DEPTH) {
            for (uint32_t e = t; e < TILE * TILE_DEPTH; e += TILE_THREADS) {
                uint32_t channel = e % TILE, i = e / TILE;
                const float *row = rows.x + h * rows.head + (size_t)(at + i) * rows.step,
                            *middle = mean + (size_t)h * d;
                bool there = at + i < end;
                a[i * TILE_LINE + channel] =
                    there && row0 + channel < d ? row[row0 + channel] - middle[row0 + channel] : 0.0f;
                b[i * TILE_LINE + channel] =
                    there && column0 + channel < d ? row[column0 + channel] - middle[column0 + channel] : 0.0f;
            }
            __syncthreads();
            tile_multiply(s, a, b);
            __syncthreads();
        }
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) sum[i][j] += (double)s[i][j];
    }
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t row = row0 + 4 * ty + i, column = column0 + 4 * tx + j;
            if (row < d && column < d) covariance[((size_t)h * d + row) * d + column] = (float)(sum[i][j] / rows.n);
        }
}

// out[h, j] = (linear_h + square_h k_j) . k_j, square may be NULL; block (x, y): 64 positions of head y.
static __global__ void __launch_bounds__(TILE_THREADS)
    quadratic_kernel(float *out, const float *k, const float *linear, const float *square, uint32_t n_tokens,
                     attention_shape shape)
{
    __shared__ tile_memory shared;
    uint32_t h = blockIdx.y, d = shape.head_dim, key0 = blockIdx.x * TILE, n_keys = at_most(n_tokens - key0, TILE);
    uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const float *keys = k + ((size_t)(h / (shape.n_heads / shape.n_kv_heads)) * n_tokens + key0) * d;
    float column[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t row0 = 0; row0 < d; row0 += TILE) {
        float s[4][4];
        clear_scores(s);
        tile_rows rows = {square + (size_t)h * d * d, row0, at_most(d - row0, TILE), 1, d};
        if (square) tile_product(s, &shared, rows, keys, n_keys, d);
        for (uint32_t i = 0; i < 4 && 4 * ty + i < rows.count; i++) {
            uint32_t row = row0 + 4 * ty + i;
            for (uint32_t j = 0; j < 4 && 4 * tx + j < n_keys; j++)
                column[j] =
                    fmaf(s[i][j] + linear[(size_t)h * d + row], keys[(size_t)(4 * tx + j) * d + row], column[j]);
        }
    }
    float sum = column_sum(column, &shared);
    if (threadIdx.x < n_keys) out[(size_t)h * n_tokens + key0 + threadIdx.x] = sum;
}

// Block (x, y): partition x of KV head y; ROW_THREADS threads.
static __global__ void spreads_kernel(float *out, const float *z, uint32_t n_tokens, uint32_t d, partition_row row)
{
    __shared__ float low[MAX_HEAD_DIM], scale[MAX_HEAD_DIM];
    uint32_t at = row.first + blockIdx.x * row.size, from = row.own ? at : at + row.size, lane = threadIdx.x % WARP;
    const float *head = z + (size_t)blockIdx.y * n_tokens * d;
    for (uint32_t c = threadIdx.x; c < d; c += ROW_THREADS) {
        float least = head[(size_t)from * d + c], most = least;
        for (uint32_t i = from + 1; i < from + row.size; i++) {
            least = fminf(least, head[(size_t)i * d + c]);
            most = fmaxf(most, head[(size_t)i * d + c]);
        }
        low[c] = least;
        scale[c] = most > least ? 1.0f / (most - least) : 0.0f;
    }
    __syncthreads();
    for (uint32_t j = at + threadIdx.x / WARP; j < at + row.size; j += ROW_THREADS / WARP) {
        const float *values = head + (size_t)j * d;
        double sum = 0.0, square = 0.0;
        for (uint32_t c = lane; c < d; c += WARP) sum += (double)((values[c] - low[c]) * scale[c]);
        double mean = warp_sum(sum) / d;
        for (uint32_t c = lane; c < d; c += WARP) {
            double off = (double)((values[c] - low[c]) * scale[c]) - mean;
            square += off * off;
        }
        square = warp_sum(square);
        if (lane == 0) out[(size_t)blockIdx.y * n_tokens + j] = (float)sqrt(square / (d > 1 ? d - 1 : 1));
    }
}
