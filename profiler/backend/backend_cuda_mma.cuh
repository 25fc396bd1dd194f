// bfloat16 and the instructions of the tensor cores (compute capability 8.0 and later), with their layouts of
// registers.
//
// A warp multiplies a [16 rows, 16 dimensions] by b [16 dimensions, 8 columns] and adds to c [16, 8]. With line = lane
// / 4 and pair = lane % 4 a lane holds, two values per register and the lower column in the lower half,
//     a[0], a[1]: rows line and line + 8, columns 2 pair and 2 pair + 1;   a[2], a[3]: the same rows, columns 8 further
//     b0, b1:     dimensions 2 pair, 2 pair + 1 and 8 further, of column line
//     c[0], c[1]: row line, columns 2 pair, 2 pair + 1;                    c[2], c[3]: row line + 8
// So two neighbouring c of scores, rounded, are an a of weights.
#pragma once
#include "profiler/backend/backend_cuda_tile.cuh"
#include <string.h>

// The upper half of a float, rounded to nearest, ties to even; a NaN stays one.
static __host__ __device__ inline uint16_t bf16_from_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static __host__ __device__ inline float bf16_to_float(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#ifdef __CUDACC__ // else tests/cuda/cuda_runtime.h has functions of these names
static __device__ inline uint32_t pack_bf16(float low, float high)
{
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// c += a b
static __device__ inline void mma_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ inline uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Four 8 x 8 blocks of 16 bits from shared memory: lane 8 i + r names line r of block i (16 bytes, aligned so), and
// register i gets the values 2 pair, 2 pair + 1 of block i's line `line`; turned: those of column `line`, from the
// lines 2 pair, 2 pair + 1.
static __device__ inline void load_blocks(uint32_t r[4], const void *line)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(line))
                 : "memory");
}

static __device__ inline void load_blocks_turned(uint32_t r[4], const void *line)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(line))
                 : "memory");
}

// Starts a copy of 16 aligned bytes to shared memory, or of zeros where `there` is false (`from` must be an address
// even then). What was started before copy_commit is one group; copy_wait_but<N> waits until at most the thread's N
// latest groups are on their way.
static __device__ inline void copy_async(void *to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

static __device__ inline void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> static __device__ inline void copy_wait_but(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#define DYNAMIC_SHARED(type, name)                          \
    extern __shared__ __align__(128) char dynamic_shared[]; \
    type *name = (type *)dynamic_shared
#endif

static constexpr uint32_t MMA_WARPS = 4;
static constexpr uint32_t MMA_THREADS = MMA_WARPS * WARP;
static constexpr uint32_t MMA_MAX_DIM = 256; // longer heads would not fit in registers

// Heads are padded to 64 CHUNKS dimensions, which are 8 CHUNKS blocks of 16 bytes; a step of a loop takes this many
// keys.
template <int CHUNKS> static constexpr int MMA_KEYS = CHUNKS > 2 ? 32 : 64;
template <int CHUNKS> static constexpr int MMA_TILES = CHUNKS > 2 ? 1 : 2; // 16 rows per warp of prefill each

// Block `block` of a line: the eight lines of an 8 x 8 block lie in different banks.
template <int CHUNKS, typename T> static __device__ inline T *block_at(T *lines, uint32_t line, uint32_t block)
{
    return lines + line * 8 * CHUNKS + (block ^ (line & 7));
}

// Shared memory of a block of threads with 16 TILES rows per warp: the rows, and keys (and values) of the step at hand
// and of the next.
template <int CHUNKS, int TILES> struct mma_keys {
    uint4 rows[16 * TILES * MMA_WARPS * 8 * CHUNKS];
    uint4 keys[2][MMA_KEYS<CHUNKS> * 8 * CHUNKS];
};
template <int CHUNKS, int TILES> struct mma_keys_and_values {
    mma_keys<CHUNKS, TILES> of;
    uint4 values[2][MMA_KEYS<CHUNKS> * 8 * CHUNKS];
};

// Rounds n rows to shared memory; those past their count, and dimensions past `depth`, are zeros.
template <int CHUNKS> static __device__ inline void mma_load_rows(uint4 *to, uint32_t n, tile_rows rows, uint32_t depth)
{
    for (uint32_t e = threadIdx.x; e < n * 8 * CHUNKS; e += MMA_THREADS) {
        uint32_t r = e / (8 * CHUNKS), block = e % (8 * CHUNKS), line = rows.first + r, two[4];
        const float *row = rows.base + line / rows.group * rows.stride + (size_t)(line % rows.group) * depth;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t c = 8 * block + 2 * i;
            two[i] = pack_bf16(r < rows.count && c < depth ? row[c] : 0.0f,
                               r < rows.count && c + 1 < depth ? row[c + 1] : 0.0f);
        }
        *block_at<CHUNKS>(to, r, block) = {two[0], two[1], two[2], two[3]};
    }
}

// Starts the copy of the step's keys (or values) from `from` [n_keys, 64 CHUNKS] of 16 bits; lines past them are zeros.
template <int CHUNKS> static __device__ inline void mma_start_keys(uint4 *to, const uint4 *from, uint32_t n_keys)
{
    for (uint32_t e = threadIdx.x; e < (uint32_t)MMA_KEYS<CHUNKS> * 8 * CHUNKS; e += MMA_THREADS) {
        uint32_t key = e / (8 * CHUNKS);
        bool there = key < n_keys;
        copy_async(block_at<CHUNKS>(to, key, e % (8 * CHUNKS)), from + (there ? e : 0), there);
    }
}

// s = rows . keys: tile m of the warp, columns 8 n .. 8 n + 7 at s[m][n], laid out as c.
template <int CHUNKS, int TILES>
static __device__ inline void mma_scores(float s[TILES][MMA_KEYS<CHUNKS> / 8][4], const uint4 *rows, const uint4 *keys)
{
    uint32_t lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 * TILES + lane % 16,
             key = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < MMA_KEYS<CHUNKS> / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < 4 * CHUNKS; step++) { // 16 dimensions, two blocks
        uint32_t a[TILES][4], b[4];
#pragma unroll
        for (int m = 0; m < TILES; m++) load_blocks(a[m], block_at<CHUNKS>(rows, row + 16 * m, 2 * step + lane / 16));
#pragma unroll
        for (int n = 0; n < MMA_KEYS<CHUNKS> / 16; n++) {
            load_blocks(b, block_at<CHUNKS>(keys, key + 16 * n, 2 * step + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                mma_bf16(s[m][2 * n], a[m], b[0], b[1]);
                mma_bf16(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Over the four lanes that share a row.
static __device__ inline float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

static __device__ inline float quad_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// Softmax of rows in steps of keys, in powers of two: a weight is 2^(score log2(e) / sqrt(d) - top). Index [m][half]:
// row line + 8 half of the warp's tile m. `sum` is the lane's share; quad_sum makes it the row's.
template <int TILES> struct mma_sums {
    float top[TILES][2], sum[TILES][2];
};

static constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

template <int TILES> static __device__ inline void mma_sums_begin(mma_sums<TILES> *state)
{
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) state->top[m][half] = -INFINITY, state->sum[m][half] = 0.0f;
}

// Turns the scores of a step's N columns (-INFINITY where a row does not see the key) into weights and adds them up;
// shrink is what everything that was weighted before is to be multiplied by.
template <int TILES, int N>
static __device__ inline void mma_softmax(mma_sums<TILES> *state, float s[TILES][N][4], float shrink[TILES][2],
                                          float scale)
{
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            top = fmaxf(state->top[m][half], quad_max(top) * scale);
            // Of a row that has seen nothing yet all weights are 0; -inf minus -inf is not a number.
            float base = top == -INFINITY ? 0.0f : top;
            shrink[m][half] = exp2f(state->top[m][half] - base);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[m][n][i] = exp2f(fmaf(s[m][n][i], scale, -base));
                    sum += s[m][n][i];
                }
            state->top[m][half] = top;
            state->sum[m][half] = fmaf(state->sum[m][half], shrink[m][half], sum);
        }
}

// values = values * shrink + weights . values of the step's keys; the weights are rounded, their sums are not.
template <int CHUNKS, int TILES>
static __device__ inline void mma_values(float values[TILES][8 * CHUNKS][4], float s[TILES][MMA_KEYS<CHUNKS> / 8][4],
                                         const float shrink[TILES][2], const uint4 *v)
{
    uint32_t lane = threadIdx.x % WARP, key = lane % 16, block = lane / 16;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < 8 * CHUNKS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[m][n][i] *= shrink[m][i / 2];
#pragma unroll
    for (int step = 0; step < MMA_KEYS<CHUNKS> / 16; step++) {
        uint32_t a[TILES][4], b[4];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *c = s[m][2 * step + i / 2] + i % 2 * 2;
                a[m][i] = pack_bf16(c[0], c[1]);
            }
#pragma unroll
        for (int n = 0; n < 4 * CHUNKS; n++) {
            load_blocks_turned(b, block_at<CHUNKS>(v, 16 * step + key, 2 * n + block));
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                mma_bf16(values[m][2 * n], a[m], b[0], b[1]);
                mma_bf16(values[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}
