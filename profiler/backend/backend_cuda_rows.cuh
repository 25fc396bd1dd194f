// Kernels of the operations that go row by row: gather, norm, rotation, gated activation, moves into the caches,
// conversions, sampling.
#pragma once
extern "C" {
#include "profiler/backend/sampler_core.h"
}
#include "profiler/backend/backend_cuda_tile.cuh"
#include <string.h>

// Returns the upper half of a float, rounded to nearest, ties to even; a NaN stays NaN.
static __device__ inline uint16_t bf16_from_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static __device__ inline float bf16_to_float(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static constexpr uint32_t ROW_THREADS = 256; // threads of every kernel of this file

static __device__ inline size_t thread_index(void)
{
    return (size_t)blockIdx.x * blockDim.x + threadIdx.x;
}

// Returns the sum over the ROW_THREADS threads of a block, the same in all of them. Ends with a barrier.
static __device__ inline float block_sum(float x, float *shared)
{
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0.0f;
    for (uint32_t w = 0; w < ROW_THREADS / WARP; w++) sum += shared[w];
    __syncthreads();
    return sum;
}

// One block per row.
static __global__ void gather_kernel(float *y, const float *table, const int32_t *ids, uint32_t width)
{
    size_t to = (size_t)blockIdx.x * width, from = (size_t)ids[blockIdx.x] * width;
    for (uint32_t c = threadIdx.x; c < width; c += blockDim.x) y[to + c] = table[from + c];
}

// One block per row.
static __global__ void rms_norm_kernel(float *y, const float *x, const float *weight, uint32_t width, float eps)
{
    __shared__ float sums[ROW_THREADS / WARP];
    const float *in = x + (size_t)blockIdx.x * width;
    float *out = y + (size_t)blockIdx.x * width, square = 0.0f;
    for (uint32_t c = threadIdx.x; c < width; c += ROW_THREADS) square = fmaf(in[c], in[c], square);
    float scale = 1.0f / sqrtf(block_sum(square, sums) / (float)width + eps);
    for (uint32_t c = threadIdx.x; c < width; c += ROW_THREADS) out[c] = in[c] * scale * weight[c];
}

// One block per row.
static __global__ void layer_norm_kernel(float *y, const float *x, const float *weights, uint32_t width,
                                         uint32_t n_weights, float eps)
{
    __shared__ float sums[ROW_THREADS / WARP];
    const float *in = x + (size_t)blockIdx.x * width, *weight = weights + (size_t)(blockIdx.x % n_weights) * width;
    float *out = y + (size_t)blockIdx.x * width, sum = 0.0f, square = 0.0f;
    for (uint32_t c = threadIdx.x; c < width; c += ROW_THREADS) sum += in[c];
    float mean = block_sum(sum, sums) / (float)width;
    for (uint32_t c = threadIdx.x; c < width; c += ROW_THREADS) square = fmaf(in[c] - mean, in[c] - mean, square);
    float scale = 1.0f / sqrtf(block_sum(square, sums) / (float)width + eps);
    for (uint32_t c = threadIdx.x; c < width; c += ROW_THREADS) out[c] = (in[c] - mean) * scale * weight[c];
}

// g * sigmoid(x), with the exponential of a negative number only, so that it cannot overflow.
static __device__ inline float times_sigmoid(float g, float x)
{
    float e = expf(-fabsf(x));
    return g * (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

// silu(g) = g sigmoid(g); 0.5 g (1 + tanh(u)) = g sigmoid(2 u)
static __global__ void glu_kernel(float *gate, const float *up, activation act, size_t n)
{
    size_t i = thread_index();
    if (i >= n) return;
    float g = gate[i], u = up[i];
    if (act == SILU) gate[i] = times_sigmoid(g, g) * u;
    if (act == GELU_TANH) gate[i] = times_sigmoid(g, 1.59576912f * (g + 0.044715f * g * g * g)) * u;
    if (act == SWIGLU_CLAMPED) {
        g = fminf(g, 7.0f);
        gate[i] = times_sigmoid(g, 1.702f * g) * (fminf(fmaxf(u, -7.0f), 7.0f) + 1.0f);
    }
}

static __global__ void softcap_kernel(float *y, float cap, size_t n)
{
    size_t i = thread_index();
    if (i < n) y[i] = cap * tanhf(y[i] / cap);
}

static __global__ void clip_kernel(float *y, float most, size_t n)
{
    size_t i = thread_index();
    if (i < n) y[i] = fminf(fmaxf(y[i], -most), most);
}

static __global__ void take_rows_kernel(float *y, const float *x, const uint32_t *rows, size_t n, uint32_t width)
{
    size_t i = thread_index();
    if (i < n) y[i] = x[(size_t)rows[i / width] * width + i % width];
}

static __global__ void add_rows_kernel(float *y, const float *x, const uint32_t *rows, const float *weights, size_t n,
                                       uint32_t width)
{
    size_t i = thread_index();
    if (i >= n) return;
    float *to = y + (size_t)rows[i / width] * width + i % width;
    *to = fmaf(weights[i / width], x[i], *to);
}

static __global__ void multiply_kernel(float *y, float by, size_t n)
{
    size_t i = thread_index();
    if (i < n) y[i] *= by;
}

static __global__ void add_row_kernel(float *y, const float *row, size_t n, uint32_t width)
{
    size_t i = thread_index();
    if (i < n) y[i] += row[i % width];
}

static __global__ void add_scaled_kernel(float *y, const float *x, float by, size_t n)
{
    size_t i = thread_index();
    if (i < n) y[i] = fmaf(by, x[i], y[i]);
}

// One thread per pair (p, p + rope_dim/2) and per dimension that does not rotate; y may be x, since a thread reads only
// what it writes.
static __global__ void rope_kernel(float *y, const float *x, const float *cos_sin, const uint32_t *positions,
                                   uint32_t n, uint32_t heads, uint32_t d, uint32_t rope_dim)
{
    uint32_t half = rope_dim / 2, each = half + (d - rope_dim);
    size_t i = thread_index();
    if (i >= (size_t)n * heads * each) return;
    uint32_t p = (uint32_t)(i % each);
    size_t row = i / each / heads, at = i / each * d;
    if (p >= half) {
        y[at + p - half + rope_dim] = x[at + p - half + rope_dim];
        return;
    }
    const float *angle = cos_sin + (size_t)positions[row] * rope_dim + 2 * p;
    float a = x[at + p], b = x[at + p + half], c = angle[0], s = angle[1];
    y[at + p] = a * c - b * s;
    y[at + p + half] = b * c + a * s;
}

static __global__ void store_prefix_kernel(float *cache, uint32_t n_tokens, uint32_t first, const float *values,
                                           uint32_t n, uint32_t n_kv_heads, uint32_t d)
{
    size_t i = thread_index();
    if (i >= (size_t)n * n_kv_heads * d) return;
    size_t row = i / d / n_kv_heads, g = i / d % n_kv_heads;
    cache[(g * n_tokens + first + row) * d + i % d] = values[i];
}

static __global__ void store_tail_kernel(float *cache, uint32_t capacity, const decode_row *rows, const float *values,
                                         uint32_t n, uint32_t n_kv_heads, uint32_t d)
{
    size_t i = thread_index();
    if (i >= (size_t)n * n_kv_heads * d) return;
    size_t row = i / d / n_kv_heads, g = i / d % n_kv_heads;
    cache[(((size_t)rows[row].question * n_kv_heads + g) * capacity + rows[row].tail) * d + i % d] = values[i];
}

// high = bf16(x); low, if any, = bf16(x - high). Elements from n to n_padded become zeros.
static __global__ void to_bf16_kernel(uint16_t *high, uint16_t *low, const float *x, size_t n, size_t n_padded)
{
    size_t i = thread_index();
    if (i >= n_padded) return;
    float value = i < n ? x[i] : 0.0f;
    high[i] = bf16_from_float(value);
    if (low) low[i] = bf16_from_float(value - bf16_to_float(high[i]));
}

static __global__ void scale_kernel(float *x, size_t n, const float *factor)
{
    size_t i = thread_index();
    if (i < n) x[i] *= *factor;
}

static constexpr size_t SUM_SPAN = 4096; // values per thread block of sum_kernel

// sums[0] = sum over the block's threads, to be read by the first of them.
static __device__ inline void sum_block(double sums[ROW_THREADS], double sum)
{
    sums[threadIdx.x] = sum;
    for (uint32_t step = ROW_THREADS / 2; step; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
    }
}

// partial[b] = sum of block b's span, in double, in one order whatever the device.
static __global__ void sum_kernel(double *partial, const float *x, size_t n)
{
    __shared__ double sums[ROW_THREADS];
    size_t from = (size_t)blockIdx.x * SUM_SPAN, to = from + SUM_SPAN < n ? from + SUM_SPAN : n;
    double sum = 0.0;
    for (size_t i = from + threadIdx.x; i < to; i += ROW_THREADS) sum += (double)x[i];
    sum_block(sums, sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}

// factor = 1 / (sum of the n partial sums + 1e-9); one block.
static __global__ void inverse_kernel(float *factor, const double *partial, size_t n)
{
    __shared__ double sums[ROW_THREADS];
    double sum = 0.0;
    for (size_t i = threadIdx.x; i < n; i += ROW_THREADS) sum += partial[i];
    sum_block(sums, sum);
    if (threadIdx.x == 0) *factor = (float)(1.0 / (sums[0] + 1e-9));
}

// One block per row, one thread per part (sampler_core.h).
static __global__ void sample_kernel(int32_t *ids, const float *logits, uint32_t n, sampler s, float scale,
                                     const draw_key *keys)
{
    __shared__ double sums[SAMPLER_PARTS];
    __shared__ uint32_t
        tops[SAMPLER_PARTS]; // of each part: the place of its largest logit; n: none; n + 1: one is NaN or +infinity
    __shared__ uint32_t top;
    const float *row = logits + (size_t)blockIdx.x * n;
    uint32_t size = (uint32_t)sampler_part_size(n), from = threadIdx.x * size, best = n;
    uint32_t to = from < n ? (n - from < size ? n : from + size) : from;
    for (uint32_t i = from; i < to; i++) {
        if (row[i] != row[i] || row[i] == INFINITY) best = n + 1;
        else if (best == n ? row[i] != -INFINITY : best < n && row[i] > row[best]) best = i;
    }
    tops[threadIdx.x] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        top = n;
        for (uint32_t p = 0; p < SAMPLER_PARTS; p++)
            if (tops[p] > n) top = n + 1;
            else if (tops[p] < n && (top == n || (top < n && row[tops[p]] > row[top])))
                top = tops[p]; // ties: the lower id
    }
    __syncthreads();
    bool valid = top < n;
    double sum = 0.0;
    for (uint32_t i = from; valid && !s.greedy && i < to; i++) sum += (double)sampler_weight(row[i], row[top], scale);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return; // no barrier follows
    draw_key key = keys[blockIdx.x];
    if (!valid) ids[blockIdx.x] = -1;
    else if (s.greedy) ids[blockIdx.x] = (int32_t)top;
    else
        ids[blockIdx.x] =
            sampler_walk(sums, row, n, top, scale, philox_uniform(s.seed, key.context, key.question, key.step));
}
