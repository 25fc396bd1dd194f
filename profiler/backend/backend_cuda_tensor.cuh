// Attention on the tensor cores, for `--compute bf16` and heads of at most 256 dimensions: the kernels of
// backend_cuda_attention.cuh again, over keys and values that pack_prefix has rounded. Queries and weights are rounded
// on the way; scores, softmax, sums and importance are float32.
#pragma once
#include "profiler/backend/backend_cuda_attention.cuh"
#include "profiler/backend/backend_cuda_mma.cuh"

// Keys and values [G, T, 64 CHUNKS] of 16 bits, as blocks of 16 bytes.
struct packed_kv {
    const uint4 *k, *v;
};

// Two values per thread: packed keys, and behind them values, from [lines, d] each; zeros past d.
static __global__ void pack_kernel(uint32_t *packed, const float *k, const float *v, size_t n_lines, uint32_t d,
                                   uint32_t padded)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, line = i / (padded / 2);
    uint32_t c = (uint32_t)(i % (padded / 2)) * 2;
    if (line >= 2 * n_lines) return;
    const float *from = line < n_lines ? k + line * d : v + (line - n_lines) * d;
    packed[i] = pack_bf16(c < d ? from[c] : 0.0f, c + 1 < d ? from[c + 1] : 0.0f);
}

// Calls step(key0, turn) for the keys from, from + MMA_KEYS, .. below end, when those of this step lie in keys[turn]
// (and values[turn], where v is given): while they are used, the next ones are copied.
template <int CHUNKS, typename STEP>
static __device__ inline void mma_each_step(uint4 (*keys)[MMA_KEYS<CHUNKS> * 8 * CHUNKS],
                                            uint4 (*values)[MMA_KEYS<CHUNKS> * 8 * CHUNKS], packed_kv kv, uint32_t from,
                                            uint32_t end, STEP step)
{
    constexpr uint32_t KEYS = MMA_KEYS<CHUNKS>;
    auto start = [&](uint32_t key0, uint32_t turn) {
        size_t at = (size_t)key0 * 8 * CHUNKS;
        if (key0 < end) mma_start_keys<CHUNKS>(keys[turn], kv.k + at, end - key0);
        if (key0 < end && kv.v) mma_start_keys<CHUNKS>(values[turn], kv.v + at, end - key0);
        copy_commit();
    };
    uint32_t turn = 0;
    start(from, turn);
    for (uint32_t key0 = from; key0 < end; key0 += KEYS, turn ^= 1) {
        start(key0 + KEYS, turn ^ 1);
        copy_wait_but<1>();
        __syncthreads();
        step(key0, turn);
        __syncthreads(); // the step after the next one is copied to this place
    }
}

// log2(e) / sqrt(d)
static __device__ inline float mma_scale(uint32_t d)
{
    return LOG2_E / sqrtf((float)d);
}

// Softcapped scores in the place of q . k; what follows multiplies with log2(e) / sqrt(d) as ever.
template <int TILES, int N> static __device__ inline void mma_bend(float s[TILES][N][4], const attention_shape &shape)
{
    if (!(shape.softcap > 0.0f)) return;
    float root = sqrtf((float)shape.head_dim);
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = bend_score(shape, s[m][n][i] / root) * root;
}

// Hides the keys of a step that starts at key0 and stand before what begins(r) says of row r of the block.
template <int TILES, int N, typename BEGINS>
static __device__ inline void mma_hide_before(float s[TILES][N][4], uint32_t key0, BEGINS begins)
{
    uint32_t lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 * TILES + lane / 4, key = key0 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t from = begins(row + 16 * m + 8 * half);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (key + 8 * n + i < from) s[m][n][2 * half + i] = -INFINITY;
        }
}

// Row r of the block sees the keys below seen + r * more: hides the others of a step that starts at key0.
template <int TILES, int N>
static __device__ inline void mma_hide(float s[TILES][N][4], uint32_t key0, uint32_t seen, uint32_t more)
{
    uint32_t lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 * TILES + lane / 4, key = key0 + lane % 4 * 2;
    if (key0 + 8 * N <= seen) return;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (key + 8 * n + i % 2 >= seen + (row + 16 * m + i / 2 * 8) * more) s[m][n][i] = -INFINITY;
}

// Attention of the block's rows, which lie in shared memory, over the keys from .. end - 1.
template <int CHUNKS, int TILES, typename BEGINS>
static __device__ inline void mma_attend(mma_sums<TILES> *state, float values[TILES][8 * CHUNKS][4],
                                         mma_keys_and_values<CHUNKS, TILES> *shared, packed_kv kv, uint32_t from,
                                         uint32_t end, uint32_t seen, uint32_t more, const attention_shape &shape,
                                         BEGINS begins)
{
    float scale = mma_scale(shape.head_dim);
    mma_sums_begin(state);
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < 8 * CHUNKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[m][n][i] = 0.0f;
    mma_each_step<CHUNKS>(shared->of.keys, shared->values, kv, from, end, [&](uint32_t key0, uint32_t turn) {
        float s[TILES][MMA_KEYS<CHUNKS> / 8][4], shrink[TILES][2];
        mma_scores<CHUNKS, TILES>(s, shared->of.rows, shared->of.keys[turn]);
        mma_bend<TILES>(s, shape);
        if (shape.window) mma_hide_before<TILES>(s, key0, begins);
        mma_hide<TILES>(s, key0, seen, more);
        mma_softmax(state, s, shrink, scale);
        mma_values<CHUNKS, TILES>(values, s, shrink, shared->values[turn]);
    });
}

// Block (x, y): 64 TILES context rows of query head y, as attend_prefix_kernel.
template <int CHUNKS, int TILES>
static __global__ void __launch_bounds__(MMA_THREADS)
    attend_prefix_mma_kernel(float *o, const float *q, packed_kv kv, uint32_t n_tokens, uint32_t first, uint32_t n,
                             attention_shape shape)
{
    using memory = mma_keys_and_values<CHUNKS, TILES>;
    DYNAMIC_SHARED(memory, shared);
    constexpr uint32_t ROWS = 16 * TILES * MMA_WARPS;
    uint32_t row0 = (gridDim.x - 1 - blockIdx.x) * ROWS, h = blockIdx.y, d = shape.head_dim;
    uint32_t n_rows = at_most(n - row0, ROWS), lane = threadIdx.x % WARP;
    size_t line = (size_t)shape.n_heads * d,
           head = (size_t)(h / (shape.n_heads / shape.n_kv_heads)) * n_tokens * 8 * CHUNKS;
    mma_sums<TILES> state;
    float values[TILES][8 * CHUNKS][4];
    mma_load_rows<CHUNKS>(shared->of.rows, ROWS, {q + (size_t)h * d, row0, n_rows, 1, line}, d);
    mma_attend<CHUNKS, TILES>(&state, values, shared, {kv.k + head, kv.v + head},
                              first_seen(shape, first + row0) / MMA_KEYS<CHUNKS> * MMA_KEYS<CHUNKS>,
                              first + row0 + n_rows, first + row0 + 1, 1, shape,
                              [&](uint32_t r) { return first_seen(shape, first + row0 + r); });
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t r = threadIdx.x / WARP * 16 * TILES + 16 * m + lane / 4 + 8 * half;
            float inverse = inverse_sum(shape, h, state.top[m][half] * LN_2, quad_sum(state.sum[m][half])),
                  *to = o + (row0 + r) * line + (size_t)h * d;
#pragma unroll
            for (int n_block = 0; n_block < 8 * CHUNKS; n_block++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t column = 8 * n_block + lane % 4 * 2 + i;
                    if (r < n_rows && column < d) to[column] = values[m][n_block][2 * half + i] * inverse;
                }
        }
}

// Block (x, y, z): 64 lines of KV head y against stretch z of the context, as attend_stretch_kernel.
template <int CHUNKS>
static __global__ void __launch_bounds__(MMA_THREADS) attend_stretch_mma_kernel(row_pass pass, packed_kv kv)
{
    using memory = mma_keys_and_values<CHUNKS, 1>;
    DYNAMIC_SHARED(memory, shared);
    uint32_t g = blockIdx.y, d = pass.shape.head_dim, lane = threadIdx.x % WARP;
    uint32_t from = blockIdx.z * pass.stretch, end = at_most(pass.n_tokens, from + pass.stretch);
    size_t head = (size_t)g * pass.n_tokens * 8 * CHUNKS, heads = (size_t)pass.n * pass.shape.n_heads;
    tile_rows lines = pass_lines(pass, g, blockIdx.x * TILE);
    mma_sums<1> state;
    float values[1][8 * CHUNKS][4];
    mma_load_rows<CHUNKS>(shared->of.rows, TILE, lines, d);
    mma_attend<CHUNKS, 1>(&state, values, shared, {kv.k + head, kv.v + head}, from, end, end, 0, pass.shape,
                          [&](uint32_t r) { return r < lines.count ? line_begins(pass, lines.first + r) : 0; });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t r = threadIdx.x / WARP * 16 + lane / 4 + 8 * half;
        float sum = quad_sum(state.sum[0][half]);
        if (r >= lines.count) continue; // the whole quad, and no barrier follows
        size_t at = blockIdx.z * heads + line_place(pass, g, lines.first + r);
        if (lane % 4 == 0) pass.top[at] = state.top[0][half] * LN_2, pass.sum[at] = sum;
#pragma unroll
        for (int n = 0; n < 8 * CHUNKS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t column = 8 * n + lane % 4 * 2 + i;
                if (column < d) pass.values[at * d + column] = values[0][n][2 * half + i];
            }
    }
}

static constexpr uint32_t IMPORTANCE_KEYS = 256; // per block of the next kernel

// Block (x, y, z): IMPORTANCE_KEYS keys against 64 lines of KV head y, tile z, as importance_kernel.
template <int CHUNKS>
static __global__ void __launch_bounds__(MMA_THREADS)
    importance_mma_kernel(row_pass pass, packed_kv kv, float *best, size_t best_stride, const float *weights)
{
    using memory = mma_keys<CHUNKS, 1>;
    DYNAMIC_SHARED(memory, shared);
    uint32_t g = blockIdx.y, d = pass.shape.head_dim, lane = threadIdx.x % WARP, from = blockIdx.x * IMPORTANCE_KEYS,
             end = at_most(pass.n_tokens, from + IMPORTANCE_KEYS), group = pass.shape.n_heads / pass.shape.n_kv_heads;
    tile_rows lines = pass_lines(pass, g, blockIdx.z * TILE);
    float scale = mma_scale(d), top[2], inverse[2], *to[2];
    const float *w[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t r = threadIdx.x / WARP * 16 + lane / 4 + 8 * half, line = lines.first + r;
        to[half] = NULL;
        if (r >= lines.count || !pass.rows[line / group].observed) continue;
        size_t place = line_place(pass, g, line);
        top[half] = pass.top[place] * LOG2_E;
        inverse[half] = pass.sum[place];
        w[half] = weights + (size_t)(g * group + line % group) * pass.n_tokens;
        to[half] = best + pass.rows[line / group].question * best_stride + (size_t)g * pass.n_tokens;
    }
    mma_load_rows<CHUNKS>(shared->rows, TILE, lines, d);
    mma_each_step<CHUNKS>(shared->keys, NULL, {kv.k + (size_t)g * pass.n_tokens * 8 * CHUNKS, NULL}, from, end,
                          [&](uint32_t key0, uint32_t turn) {
                              float s[1][MMA_KEYS<CHUNKS> / 8][4];
                              mma_scores<CHUNKS, 1>(s, shared->rows, shared->keys[turn]);
                              mma_bend<1>(s, pass.shape);
#pragma unroll
                              for (int n = 0; n < MMA_KEYS<CHUNKS> / 8; n++)
#pragma unroll
                                  for (int i = 0; i < 4; i++) {
                                      uint32_t half = i / 2, key = key0 + 8 * n + lane % 4 * 2 + i % 2;
                                      if (!to[half] || key >= end) continue;
                                      raise_importance(to[half] + key, exp2f(fmaf(s[0][n][i], scale, -top[half])) *
                                                                           inverse[half] * w[half][key]);
                                  }
                          });
}

// Block (x, y): 64 rows of head y from row `first` on, as row_log_kernel.
template <int CHUNKS>
static __global__ void __launch_bounds__(MMA_THREADS)
    row_log_mma_kernel(float *row_log, const float *q, packed_kv kv, uint32_t n_tokens, uint32_t first,
                       attention_shape shape)
{
    using memory = mma_keys<CHUNKS, 1>;
    DYNAMIC_SHARED(memory, shared);
    uint32_t row0 = first + (gridDim.x - 1 - blockIdx.x) * TILE, h = blockIdx.y, d = shape.head_dim;
    uint32_t n_rows = at_most(n_tokens - row0, TILE), lane = threadIdx.x % WARP;
    const uint4 *keys = kv.k + (size_t)(h / (shape.n_heads / shape.n_kv_heads)) * n_tokens * 8 * CHUNKS;
    mma_sums<1> state;
    mma_sums_begin(&state);
    mma_load_rows<CHUNKS>(shared->rows, TILE, {q + (size_t)h * d, row0, n_rows, 1, (size_t)shape.n_heads * d}, d);
    mma_each_step<CHUNKS>(shared->keys, NULL, {keys, NULL}, 0, row0 + n_rows, [&](uint32_t key0, uint32_t turn) {
        float s[1][MMA_KEYS<CHUNKS> / 8][4], shrink[1][2];
        mma_scores<CHUNKS, 1>(s, shared->rows, shared->keys[turn]);
        mma_bend<1>(s, shape);
        mma_hide<1>(s, key0, row0 + 1, 1);
        mma_softmax(&state, s, shrink, mma_scale(d));
    });
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t r = threadIdx.x / WARP * 16 + lane / 4 + 8 * half;
        float sum = quad_sum(state.sum[0][half]);
        if (lane % 4 == 0 && r < n_rows)
            row_log[(size_t)h * n_tokens + row0 + r] =
                state.top[0][half] * LN_2 - logf(inverse_sum(shape, h, state.top[0][half] * LN_2, sum));
    }
}

// Block (x, y): MMA_KEYS keys of head y against the rows from `first` on that see them, as column_sums_kernel.
template <int CHUNKS>
static __global__ void __launch_bounds__(MMA_THREADS)
    column_sums_mma_kernel(float *sums, const float *row_log, const float *q, packed_kv kv, uint32_t n_tokens,
                           uint32_t first, attention_shape shape)
{
    using memory = mma_keys<CHUNKS, 1>;
    DYNAMIC_SHARED(memory, shared);
    constexpr int KEYS = MMA_KEYS<CHUNKS>;
    uint32_t key0 = blockIdx.x * KEYS, h = blockIdx.y, d = shape.head_dim, n_keys = at_most(n_tokens - key0, KEYS);
    uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, t = threadIdx.x;
    const uint4 *keys = kv.k + ((size_t)(h / (shape.n_heads / shape.n_kv_heads)) * n_tokens + key0) * 8 * CHUNKS;
    float scale = mma_scale(d), column[KEYS / 8][2] = {}, *partial = (float *)shared->rows; // [MMA_WARPS, KEYS]
    mma_start_keys<CHUNKS>(shared->keys[0], keys, n_keys);
    copy_commit();
    copy_wait_but<0>();
    for (uint32_t row0 = first > key0 ? first : key0; row0 < n_tokens; row0 += TILE) {
        uint32_t n_rows = at_most(n_tokens - row0, TILE);
        float s[1][KEYS / 8][4];
        mma_load_rows<CHUNKS>(shared->rows, TILE, {q + (size_t)h * d, row0, n_rows, 1, (size_t)shape.n_heads * d}, d);
        __syncthreads();
        mma_scores<CHUNKS, 1>(s, shared->rows, shared->keys[0]);
        mma_bend<1>(s, shape);
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t r = warp * 16 + lane / 4 + 8 * half, row = row0 + r;
            if (r >= n_rows) continue;
            float log_sum = row_log[(size_t)h * n_tokens + row] * LOG2_E;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (key0 + 8 * n + lane % 4 * 2 + i <= row)
                        column[n][i] += exp2f(fmaf(s[0][n][2 * half + i], scale, -log_sum));
        }
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = column[n][i];
            for (int step = 4; step < (int)WARP; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
            if (lane < 4) partial[warp * KEYS + 8 * n + lane * 2 + i] = sum;
        }
    __syncthreads();
    if (t < n_keys) {
        float sum = 0.0f;
        for (uint32_t w = 0; w < MMA_WARPS; w++) sum += partial[w * KEYS + t];
        sums[(size_t)h * n_tokens + key0 + t] = sum;
    }
}
