// What the attention kernels share: 64 x 64 tiles of scores, computed by 256 threads from shared memory, and the online
// softmax.
//
// Thread (tx, ty) = (t % 16, t / 16) owns rows 4 ty .. 4 ty + 3 and columns 4 tx .. 4 tx + 3 of every tile. The 16
// threads of a row are 16 neighbours of one warp, so a row is reduced by four shuffles. Every sum is taken in an order
// that depends on shapes alone; a row's numbers do not depend on which other rows share its tile.
//
// tests/cuda/emulator.h runs this very code on the CPU, thread by thread.
#pragma once
extern "C" {
#include "profiler/backend/backend.h"
}
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

static constexpr uint32_t TILE = 64;          // rows, keys and value columns per step
static constexpr uint32_t TILE_DEPTH = 32;    // dimensions of a head per step of a product
static constexpr uint32_t TILE_LINE = 68;     // floats from one line of a tile to the next: keeps float4 aligned
static constexpr uint32_t TILE_THREADS = 256; // threads of a block that works on tiles
static constexpr uint32_t WARP = 32;
static constexpr uint32_t ALL_LANES = 0xffffffffu;
static constexpr uint32_t MAX_HEAD_DIM = 512; // as BACKEND_MAX_HEAD_DIM

// `count` rows of a product. Row r of the tile is line l = first + r, which begins at base + (l / group) * stride +
// (l % group) * depth.
struct tile_rows {
    const float *base;
    uint32_t first, count, group;
    size_t stride;
};

// Shared memory of a block. The two operands of a product and the values are never needed at the same time.
struct tile_memory {
    float4 operands[TILE * TILE_LINE /
                    4]; // a [TILE_DEPTH, TILE] and b [TILE_DEPTH, TILE], or values [TILE keys, TILE columns]
    float4 weights[TILE * TILE_LINE / 4]; // [TILE keys, TILE rows]
};

template <typename T> static __device__ inline T warp_sum(T x)
{
    for (int step = WARP / 2; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// Sums over the 16 threads that share a tile's rows.
static __device__ inline float row_sum16(float x)
{
    for (int step = 8; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

static __device__ inline float row_max16(float x)
{
    for (int step = 8; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// s[i][j] += sum over c of a[c][4 ty + i] b[c][4 tx + j], a and b [DEPTH, TILE] in shared memory.
template <uint32_t DEPTH> static __device__ inline void tile_multiply(float s[4][4], const float *a, const float *b)
{
    uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (uint32_t c = 0; c < DEPTH; c++) {
        float4 x = *(const float4 *)(a + c * TILE_LINE + 4 * ty), y = *(const float4 *)(b + c * TILE_LINE + 4 * tx);
        const float left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][j] = fmaf(left[i], right[j], s[i][j]);
    }
}

// s[i][j] += row (4 ty + i) . key (4 tx + j) over `depth` dimensions. Rows and keys past their count read as zeros.
// Ends with a barrier: the operands may be overwritten.
static __device__ inline void tile_product(float s[4][4], tile_memory *shared, tile_rows rows, const float *keys,
                                           uint32_t n_keys, uint32_t depth)
{
    float *a = (float *)shared->operands, *b = a + TILE_DEPTH * TILE_LINE;
    uint32_t t = threadIdx.x;
    for (uint32_t at = 0; at < depth; at += TILE_DEPTH) {
        for (uint32_t e = t; e < TILE * TILE_DEPTH; e += TILE_THREADS) {
            uint32_t r = e / TILE_DEPTH, c = e % TILE_DEPTH;
            bool inside = at + c < depth;
            uint32_t line = rows.first + r;
            const float *row = rows.base + line / rows.group * rows.stride + (size_t)(line % rows.group) * depth;
            a[c * TILE_LINE + r] = inside && r < rows.count ? row[at + c] : 0.0f;
            b[c * TILE_LINE + r] = inside && r < n_keys ? keys[(size_t)r * depth + at + c] : 0.0f;
        }
        __syncthreads();
        tile_multiply<TILE_DEPTH>(s, a, b);
        __syncthreads();
    }
}

// Returns the score of a layer of this shape, from q . k / sqrt(d).
static __device__ inline float bend_score(const attention_shape &shape, float score)
{
    return shape.softcap > 0.0f ? shape.softcap * tanhf(score / shape.softcap) : score;
}

// Returns the first position that a row at `position` sees.
static __device__ inline uint32_t first_seen(const attention_shape &shape, uint32_t position)
{
    return shape.window && position >= shape.window ? position + 1 - shape.window : 0;
}

// Returns 1 / the sum of a row's exponentials relative to `top`, the sink of head h included.
static __device__ inline float inverse_sum(const attention_shape &shape, uint32_t h, float top, float sum)
{
    if (!shape.sinks.address) return 1.0f / sum;
    float sink = shape.sinks.address[h], most = fmaxf(top, sink), scale = expf(top - most);
    return scale / (sum * scale + expf(sink - most));
}

// What a thread's four rows have gathered so far: the running maximum of their scores, this thread's share of the sum
// of exponentials, and its columns 64 chunk + 4 tx + j of the weighted values. Heads have at most 64 CHUNKS dimensions.
template <int CHUNKS> struct softmax_state {
    float top[4], sum[4], values[CHUNKS][4][4];
};

template <int CHUNKS> static __device__ inline void softmax_begin(softmax_state<CHUNKS> *state)
{
    for (int i = 0; i < 4; i++) {
        state->top[i] = -INFINITY;
        state->sum[i] = 0.0f;
        for (int c = 0; c < CHUNKS; c++)
            for (int j = 0; j < 4; j++) state->values[c][i][j] = 0.0f;
    }
}

// One step of the online softmax: s are the scores of the next n_keys keys, -INFINITY where a row does not see the key;
// what was gathered relative to a lower maximum is scaled down. Ends with a barrier.
template <int CHUNKS>
static __device__ inline void softmax_step(softmax_state<CHUNKS> *state, float s[4][4], tile_memory *shared,
                                           const float *values, uint32_t n_keys, uint32_t d)
{
    float *v = (float *)shared->operands, *p = (float *)shared->weights;
    uint32_t t = threadIdx.x, tx = t % 16, ty = t / 16;
    for (int i = 0; i < 4; i++) {
        float top = fmaxf(fmaxf(s[i][0], s[i][1]), fmaxf(s[i][2], s[i][3]));
        top = fmaxf(state->top[i], row_max16(top));
        // A row that has seen nothing yet has nothing to scale, and -inf minus -inf is NaN.
        float shrink = state->top[i] == -INFINITY ? 0.0f : expf(state->top[i] - top);
        state->top[i] = top;
        state->sum[i] *= shrink;
        for (int j = 0; j < 4; j++) {
            float weight = s[i][j] == -INFINITY ? 0.0f : expf(s[i][j] - top);
            state->sum[i] += weight;
            p[(4 * tx + j) * TILE_LINE + 4 * ty + i] = weight;
        }
        for (int c = 0; c < CHUNKS; c++)
            for (int j = 0; j < 4; j++) state->values[c][i][j] *= shrink;
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        for (uint32_t e = t; e < TILE * TILE; e += TILE_THREADS) {
            uint32_t key = e / TILE, c = (uint32_t)chunk * TILE + e % TILE;
            v[key * TILE_LINE + e % TILE] = key < n_keys && c < d ? values[(size_t)key * d + c] : 0.0f;
        }
        __syncthreads();
        tile_multiply<TILE>(state->values[chunk], p, v);
        __syncthreads();
    }
}
