// Attention kernels on tiles (backend_cuda_tile.cuh): prefill, decoding over the shared context, the oracle's running
// maximum, the norms of values. No kernel writes probabilities to memory.
#pragma once
#include "profiler/backend/backend_cuda_tile.cuh"

static __device__ inline void clear_scores(float s[4][4])
{
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) s[i][j] = 0.0f;
}

static __device__ inline uint32_t at_most(uint32_t n, uint32_t limit)
{
    return n < limit ? n : limit;
}

// Block (x, y): 64 context rows of query head y. Row r of the pass is context row first + r and sees the keys up to
// itself.
template <int CHUNKS>
static __global__ void __launch_bounds__(TILE_THREADS)
    attend_prefix_kernel(float *o, const float *q, const float *k, const float *v, uint32_t n_tokens, uint32_t first,
                         uint32_t n, attention_shape shape)
{
    __shared__ tile_memory shared;
    // The last rows see the most keys: they go first, so that no block is left with a long loop at the end.
    uint32_t row0 = (gridDim.x - 1 - blockIdx.x) * TILE, h = blockIdx.y, d = shape.head_dim;
    uint32_t n_rows = at_most(n - row0, TILE), end = first + row0 + n_rows, tx = threadIdx.x % 16,
             ty = threadIdx.x / 16;
    size_t line = (size_t)shape.n_heads * d, at = row0 * line + (size_t)h * d;
    size_t head = (size_t)(h / (shape.n_heads / shape.n_kv_heads)) * n_tokens * d;
    float scale = 1.0f / sqrtf((float)d);
    tile_rows rows = {q + (size_t)h * d, row0, n_rows, 1, line};
    softmax_state<CHUNKS> state;
    softmax_begin(&state);
    for (uint32_t key0 = first_seen(shape, first + row0) / TILE * TILE; key0 < end; key0 += TILE) {
        uint32_t n_keys = at_most(end - key0, TILE);
        float s[4][4];
        clear_scores(s);
        tile_product(s, &shared, rows, k + head + (size_t)key0 * d, n_keys, d);
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t j = 0; j < 4; j++) {
                uint32_t key = key0 + 4 * tx + j, row = first + row0 + 4 * ty + i;
                bool seen = 4 * ty + i < n_rows && key <= row && key >= first_seen(shape, row);
                s[i][j] = seen ? bend_score(shape, s[i][j] * scale) : -INFINITY;
            }
        softmax_step(&state, s, &shared, v + head + (size_t)key0 * d, n_keys, d);
    }
    for (uint32_t i = 0; i < 4; i++) {
        float inverse = inverse_sum(shape, h, state.top[i], row_sum16(state.sum[i]));
        for (uint32_t c = 0; c < CHUNKS; c++)
            for (uint32_t j = 0; j < 4; j++) {
                uint32_t column = c * TILE + 4 * tx + j;
                if (4 * ty + i < n_rows && column < d)
                    o[at + (4 * ty + i) * line + column] = state.values[c][i][j] * inverse;
            }
    }
}

// What the kernels of one pass over decoded rows share. The heads of a group are taken together: line l of KV head g is
// head g * group + l % group of row l / group.
struct row_pass {
    const float *q;               // [n, H, d]
    const float *k, *v;           // context [G, T, d]
    const float *tail_k, *tail_v; // [questions, G, capacity, d]
    const decode_row *rows;       // [n]
    uint32_t n, n_tokens, capacity;
    attention_shape shape;
    // The context is cut into stretches, by T alone. For every decoded row and head, each stretch and the row's own
    // tail (the last part) leave the maximum, the sum of exponentials and the sum of weighted values, which
    // merge_rows_kernel joins.
    uint32_t n_parts, stretch; // stretches + 1; keys of a stretch
    float *top, *sum;          // [n_parts, n, H]; after the merge, part 0 holds the row's maximum and 1 / sum
    float *values;             // [n_parts, n, H, d]
};

static __device__ inline tile_rows pass_lines(const row_pass &pass, uint32_t g, uint32_t line0)
{
    uint32_t group = pass.shape.n_heads / pass.shape.n_kv_heads;
    return {pass.q + (size_t)g * group * pass.shape.head_dim, line0, at_most(pass.n * group - line0, TILE), group,
            (size_t)pass.shape.n_heads * pass.shape.head_dim};
}

// Returns where line l of KV head g is in arrays [n, H].
static __device__ inline size_t line_place(const row_pass &pass, uint32_t g, uint32_t line)
{
    uint32_t group = pass.shape.n_heads / pass.shape.n_kv_heads;
    return (size_t)(line / group) * pass.shape.n_heads + (size_t)g * group + line % group;
}

// Returns the first position that line l sees.
static __device__ inline uint32_t line_begins(const row_pass &pass, uint32_t line)
{
    if (!pass.shape.window) return 0;
    uint32_t row = line / (pass.shape.n_heads / pass.shape.n_kv_heads);
    return first_seen(pass.shape, pass.n_tokens + pass.rows[row].tail);
}

// Block (x, y, z) attends 64 lines of KV head y to stretch z of the context.
template <int CHUNKS> static __global__ void __launch_bounds__(TILE_THREADS) attend_stretch_kernel(row_pass pass)
{
    __shared__ tile_memory shared;
    uint32_t g = blockIdx.y, d = pass.shape.head_dim, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    uint32_t key0 = blockIdx.z * pass.stretch, end = at_most(pass.n_tokens, key0 + pass.stretch);
    size_t head = (size_t)g * pass.n_tokens * d, heads = (size_t)pass.n * pass.shape.n_heads;
    float scale = 1.0f / sqrtf((float)d);
    tile_rows lines = pass_lines(pass, g, blockIdx.x * TILE);
    softmax_state<CHUNKS> state;
    softmax_begin(&state);
    for (; key0 < end; key0 += TILE) {
        uint32_t n_keys = at_most(end - key0, TILE);
        float s[4][4];
        clear_scores(s);
        tile_product(s, &shared, lines, pass.k + head + (size_t)key0 * d, n_keys, d);
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t j = 0; j < 4; j++) {
                bool seen = 4 * tx + j < n_keys && 4 * ty + i < lines.count &&
                            key0 + 4 * tx + j >= line_begins(pass, lines.first + 4 * ty + i);
                s[i][j] = seen ? bend_score(pass.shape, s[i][j] * scale) : -INFINITY;
            }
        softmax_step(&state, s, &shared, pass.v + head + (size_t)key0 * d, n_keys, d);
    }
    for (uint32_t i = 0; i < 4; i++) {
        float sum = row_sum16(state.sum[i]);
        if (4 * ty + i >= lines.count) continue; // no barrier and no shuffle follows
        size_t at = blockIdx.z * heads + line_place(pass, g, lines.first + 4 * ty + i);
        if (tx == 0) pass.top[at] = state.top[i], pass.sum[at] = sum;
        for (uint32_t c = 0; c < CHUNKS; c++)
            for (uint32_t j = 0; j < 4; j++)
                if (c * TILE + 4 * tx + j < d) pass.values[at * d + c * TILE + 4 * tx + j] = state.values[c][i][j];
    }
}

static constexpr uint32_t LANE_VALUES = MAX_HEAD_DIM / WARP; // a lane's part of one head
static constexpr uint32_t LINE_WARPS = 4;                    // lines per block of the next two kernels

// One warp per row and head: the row's own tail, key by key.
static __global__ void __launch_bounds__(LINE_WARPS *WARP) attend_tail_kernel(row_pass pass)
{
    uint32_t lane = threadIdx.x % WARP, d = pass.shape.head_dim, H = pass.shape.n_heads;
    size_t heads = (size_t)pass.n * H, line = (size_t)blockIdx.x * LINE_WARPS + threadIdx.x / WARP;
    if (line >= heads) return; // whole warps leave, and only warps wait for each other here
    decode_row row = pass.rows[line / H];
    size_t g = line % H / (H / pass.shape.n_kv_heads);
    size_t tail = ((size_t)row.question * pass.shape.n_kv_heads + g) * pass.capacity * d;
    float scale = 1.0f / sqrtf((float)d), top = -INFINITY, sum = 0.0f, q[LANE_VALUES], values[LANE_VALUES];
#pragma unroll
    for (uint32_t i = 0; i < LANE_VALUES; i++) {
        q[i] = i * WARP + lane < d ? pass.q[line * d + i * WARP + lane] : 0.0f;
        values[i] = 0.0f;
    }
    uint32_t begins = first_seen(pass.shape, pass.n_tokens + row.tail), from = begins - at_most(begins, pass.n_tokens);
    for (uint32_t key = from; key <= row.tail; key++) {
        const float *k = pass.tail_k + tail + (size_t)key * d, *v = pass.tail_v + tail + (size_t)key * d;
        float score = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < LANE_VALUES; i++)
            if (i * WARP + lane < d) score = fmaf(q[i], k[i * WARP + lane], score);
        score = bend_score(pass.shape, warp_sum(score) * scale);
        float higher = fmaxf(top, score), shrink = key > from ? expf(top - higher) : 0.0f,
              weight = expf(score - higher);
        top = higher;
        sum = fmaf(sum, shrink, weight);
#pragma unroll
        for (uint32_t i = 0; i < LANE_VALUES; i++)
            if (i * WARP + lane < d) values[i] = fmaf(weight, v[i * WARP + lane], values[i] * shrink);
    }
    size_t at = (pass.n_parts - 1) * heads + line;
    if (lane == 0) pass.top[at] = top, pass.sum[at] = sum;
#pragma unroll
    for (uint32_t i = 0; i < LANE_VALUES; i++)
        if (i * WARP + lane < d) pass.values[at * d + i * WARP + lane] = values[i];
}

// One warp per row and head: joins the parts. Leaves the maximum and 1 / sum in part 0, for the oracle.
static __global__ void __launch_bounds__(LINE_WARPS *WARP) merge_rows_kernel(float *o, row_pass pass)
{
    uint32_t lane = threadIdx.x % WARP, d = pass.shape.head_dim;
    size_t heads = (size_t)pass.n * pass.shape.n_heads, line = (size_t)blockIdx.x * LINE_WARPS + threadIdx.x / WARP;
    if (line >= heads) return;
    float top = -INFINITY, sum = 0.0f;
    for (uint32_t part = 0; part < pass.n_parts; part++) top = fmaxf(top, pass.top[part * heads + line]);
    for (uint32_t part = 0; part < pass.n_parts; part++)
        sum = fmaf(pass.sum[part * heads + line], expf(pass.top[part * heads + line] - top), sum);
    float inverse = inverse_sum(pass.shape, (uint32_t)(line % pass.shape.n_heads), top, sum);
    for (uint32_t c = lane; c < d; c += WARP) {
        float value = 0.0f;
        for (uint32_t part = 0; part < pass.n_parts; part++)
            value = fmaf(pass.values[(part * heads + line) * d + c], expf(pass.top[part * heads + line] - top), value);
        o[line * d + c] = value * inverse;
    }
    __syncwarp();
    if (lane == 0) pass.top[line] = top, pass.sum[line] = inverse;
}

// *best = max(*best, importance). Importance is never negative, so its bits order as integers do, and a maximum of
// integers has the same result in whatever order the blocks come; a NaN is above every number, so that readers notice
// it.
static __device__ inline void raise_importance(float *best, float importance)
{
    // Read first: most tokens have been seen with more weight before. A stale value only costs the atomic.
    if (!(importance <= *best)) atomicMax((int *)best, __float_as_int(fabsf(importance)));
}

// I[question, g, j] = max(I, a[row, h, j] w[h, j]) over the observed rows of the question and the heads of the group.
// Block (x, y, z): keys of tile x against 64 lines of KV head y, tile z.
static __global__ void __launch_bounds__(TILE_THREADS)
    importance_kernel(row_pass pass, float *best, size_t best_stride, const float *weights)
{
    __shared__ tile_memory shared;
    uint32_t g = blockIdx.y, key0 = blockIdx.x * TILE, n_keys = at_most(pass.n_tokens - key0, TILE),
             d = pass.shape.head_dim;
    uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16, group = pass.shape.n_heads / pass.shape.n_kv_heads;
    float scale = 1.0f / sqrtf((float)d), s[4][4];
    tile_rows lines = pass_lines(pass, g, blockIdx.z * TILE);
    clear_scores(s);
    tile_product(s, &shared, lines, pass.k + ((size_t)g * pass.n_tokens + key0) * d, n_keys, d);
    for (uint32_t i = 0; i < 4 && 4 * ty + i < lines.count; i++) {
        uint32_t line = lines.first + 4 * ty + i;
        decode_row row = pass.rows[line / group];
        if (!row.observed) continue;
        size_t place = line_place(pass, g, line);
        const float *w = weights + (size_t)(g * group + line % group) * pass.n_tokens + key0;
        float *to = best + row.question * best_stride + (size_t)g * pass.n_tokens + key0;
        for (uint32_t j = 4 * tx; j < 4 * tx + 4 && j < n_keys; j++) {
            float score = bend_score(pass.shape, s[i][j - 4 * tx] * scale);
            raise_importance(to + j, expf(score - pass.top[place]) * pass.sum[place] * w[j]);
        }
    }
}

// Sums over the 16 threads of a column; thread t < 64 returns the sum of column t. Ends without a barrier.
static __device__ inline float column_sum(const float column[4], tile_memory *shared)
{
    float *lines = (float *)shared->weights;
    uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (uint32_t j = 0; j < 4; j++) lines[ty * TILE_LINE + 4 * tx + j] = column[j];
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < TILE)
        for (uint32_t y = 0; y < 16; y++) sum += lines[y * TILE_LINE + threadIdx.x];
    return sum;
}

// w[h, j] = ||root_h v_j||: block (x, y) has 64 positions of head y.
static __global__ void __launch_bounds__(TILE_THREADS)
    value_norms_kernel(float *w, const float *v, const float *root, uint32_t n_tokens, attention_shape shape)
{
    __shared__ tile_memory shared;
    uint32_t h = blockIdx.y, d = shape.head_dim, key0 = blockIdx.x * TILE, n_keys = at_most(n_tokens - key0, TILE);
    size_t head = (size_t)(h / (shape.n_heads / shape.n_kv_heads)) * n_tokens * d;
    float square[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t row0 = 0; row0 < d; row0 += TILE) {
        tile_rows rows = {root + (size_t)h * d * d, row0, at_most(d - row0, TILE), 1, d};
        float s[4][4];
        clear_scores(s);
        tile_product(s, &shared, rows, v + head + (size_t)key0 * d, n_keys, d);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) square[j] = fmaf(s[i][j], s[i][j], square[j]);
    }
    float sum = column_sum(square, &shared);
    if (threadIdx.x < n_keys) w[(size_t)h * n_tokens + key0 + threadIdx.x] = sqrtf(sum);
}

// row_log[h, i] = log of the sum over j <= i of exp(score), and of the sink's, for context row i; block (x, y): 64 rows
// of head y from row `first` on.
static __global__ void __launch_bounds__(TILE_THREADS)
    row_log_kernel(float *row_log, const float *q, const float *k, uint32_t n_tokens, uint32_t first,
                   attention_shape shape)
{
    __shared__ tile_memory shared;
    uint32_t row0 = first + (gridDim.x - 1 - blockIdx.x) * TILE, h = blockIdx.y, d = shape.head_dim;
    uint32_t n_rows = at_most(n_tokens - row0, TILE), tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    tile_rows rows = {q + (size_t)h * d, row0, n_rows, 1, (size_t)shape.n_heads * d};
    const float *keys = k + (size_t)(h / (shape.n_heads / shape.n_kv_heads)) * n_tokens * d;
    float scale = 1.0f / sqrtf((float)d), top[4], sum[4];
    for (int i = 0; i < 4; i++) top[i] = -INFINITY, sum[i] = 0.0f;
    for (uint32_t key0 = 0; key0 < row0 + n_rows; key0 += TILE) {
        float s[4][4];
        clear_scores(s);
        tile_product(s, &shared, rows, keys + (size_t)key0 * d, at_most(row0 + n_rows - key0, TILE), d);
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t j = 0; j < 4; j++)
                if (key0 + 4 * tx + j <= row0 + 4 * ty + i) {
                    float score = bend_score(shape, s[i][j] * scale), higher = fmaxf(top[i], score);
                    sum[i] = (top[i] == -INFINITY ? 0.0f : sum[i] * expf(top[i] - higher)) + expf(score - higher);
                    top[i] = higher;
                }
    }
    for (uint32_t i = 0; i < 4; i++) { // a thread whose columns the row does not see has gathered nothing
        float higher = row_max16(top[i]), all = row_sum16(top[i] == -INFINITY ? 0.0f : sum[i] * expf(top[i] - higher));
        if (tx == 0 && 4 * ty + i < n_rows)
            row_log[(size_t)h * n_tokens + row0 + 4 * ty + i] = higher - logf(inverse_sum(shape, h, higher, all));
    }
}

// sums[h, j] = sum over i >= j and `first` of exp(score - row_log[h, i]); block (x, y): 64 keys of head y against the
// rows that see them.
static __global__ void __launch_bounds__(TILE_THREADS)
    column_sums_kernel(float *sums, const float *row_log, const float *q, const float *k, uint32_t n_tokens,
                       uint32_t first, attention_shape shape)
{
    __shared__ tile_memory shared;
    uint32_t key0 = blockIdx.x * TILE, h = blockIdx.y, d = shape.head_dim, n_keys = at_most(n_tokens - key0, TILE);
    uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const float *keys = k + ((size_t)(h / (shape.n_heads / shape.n_kv_heads)) * n_tokens + key0) * d;
    float scale = 1.0f / sqrtf((float)d), column[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t row0 = first > key0 ? first : key0; row0 < n_tokens; row0 += TILE) {
        tile_rows rows = {q + (size_t)h * d, row0, at_most(n_tokens - row0, TILE), 1, (size_t)shape.n_heads * d};
        float s[4][4];
        clear_scores(s);
        tile_product(s, &shared, rows, keys, n_keys, d);
        for (uint32_t i = 0; i < 4 && 4 * ty + i < rows.count; i++) {
            uint32_t row = row0 + 4 * ty + i;
            float log_sum = row_log[(size_t)h * n_tokens + row];
            for (uint32_t j = 0; j < 4; j++)
                if (key0 + 4 * tx + j <= row) column[j] += expf(bend_score(shape, s[i][j] * scale) - log_sum);
        }
    }
    float sum = column_sum(column, &shared);
    if (threadIdx.x < n_keys) sums[(size_t)h * n_tokens + key0 + threadIdx.x] = sum;
}

// norms[h, j] = sum over the rows r of wo [width, H*d] of |wo[r, h*d ..] . v_j|; block (x, y): 64 positions of head y.
static __global__ void __launch_bounds__(TILE_THREADS)
    output_norms_kernel(float *norms, const float *v, const float *wo, uint32_t width, uint32_t n_tokens,
                        attention_shape shape)
{
    __shared__ tile_memory shared;
    uint32_t key0 = blockIdx.x * TILE, h = blockIdx.y, d = shape.head_dim, n_keys = at_most(n_tokens - key0, TILE);
    const float *values = v + ((size_t)(h / (shape.n_heads / shape.n_kv_heads)) * n_tokens + key0) * d;
    float column[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t row0 = 0; row0 < width; row0 += TILE) {
        tile_rows rows = {wo + (size_t)h * d, row0, at_most(width - row0, TILE), 1, (size_t)shape.n_heads * d};
        float s[4][4];
        clear_scores(s);
        tile_product(s, &shared, rows, values, n_keys, d);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) column[j] += fabsf(s[i][j]);
    }
    float sum = column_sum(column, &shared);
    if (threadIdx.x < n_keys) norms[(size_t)h * n_tokens + key0 + threadIdx.x] = sum;
}
