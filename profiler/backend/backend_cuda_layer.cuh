// What a layer does with rows, on a CUDA device: the launches of its kernels, and products by cuBLAS.
#pragma once
#include "profiler/backend/backend_cuda_memory.cuh"

static constexpr uint32_t GATHER_IDS = NOTE_BYTES / 8; // ids per launch

static void cuda_gather(backend_device *, dev y, dev_matrix table, const int32_t *ids, uint32_t n)
{
    for (uint32_t at = 0; at < n; at += GATHER_IDS) {
        uint32_t count = n - at < GATHER_IDS ? n - at : GATHER_IDS;
        const int32_t *taken = (const int32_t *)gpu_take(ids + at, count * sizeof *ids);
        LAUNCH("gather", gather_kernel, count, ROW_THREADS, y.address + (size_t)at * table.in, table.address, taken,
               table.in);
    }
}

static void cuda_rms_norm(backend_device *, dev y, dev x, dev weight_vector, uint32_t n, uint32_t width, float eps)
{
    if (n) LAUNCH("rms_norm", rms_norm_kernel, n, ROW_THREADS, y.address, x.address, weight_vector.address, width, eps);
}

static void cuda_layer_norm(backend_device *, dev y, dev x, dev weights, uint32_t n, uint32_t width, uint32_t n_weights,
                            float eps)
{
    if (n)
        LAUNCH("layer_norm", layer_norm_kernel, n, ROW_THREADS, y.address, x.address, weights.address, width, n_weights,
               eps);
}

static void cuda_glu(backend_device *, dev gate, dev up, activation act, size_t n_floats)
{
    LAUNCH_EACH("glu", glu_kernel, n_floats, gate.address, up.address, act, n_floats);
}

static void cuda_softcap(backend_device *, dev y, float cap, size_t n_floats)
{
    LAUNCH_EACH("softcap", softcap_kernel, n_floats, y.address, cap, n_floats);
}

static void cuda_clip(backend_device *, dev y, float most, size_t n_floats)
{
    LAUNCH_EACH("clip", clip_kernel, n_floats, y.address, most, n_floats);
}

static void cuda_take_rows(backend_device *, dev y, dev x, const uint32_t *rows, uint32_t n, uint32_t width)
{
    size_t floats = (size_t)n * width;
    const uint32_t *taken = n ? (const uint32_t *)gpu_take(rows, n * sizeof *rows) : NULL;
    LAUNCH_EACH("take_rows", take_rows_kernel, floats, y.address, x.address, taken, floats, width);
}

static void cuda_add_rows(backend_device *, dev y, dev x, const uint32_t *rows, const float *weights, uint32_t n,
                          uint32_t width)
{
    size_t floats = (size_t)n * width;
    const uint32_t *taken = n ? (const uint32_t *)gpu_take(rows, n * sizeof *rows) : NULL;
    const float *factors = n ? (const float *)gpu_take(weights, n * sizeof *weights) : NULL;
    LAUNCH_EACH("add_rows", add_rows_kernel, floats, y.address, x.address, taken, factors, floats, width);
}

static void cuda_scale(backend_device *, dev y, float by, size_t n_floats)
{
    LAUNCH_EACH("scale", multiply_kernel, n_floats, y.address, by, n_floats);
}

static void cuda_add_row(backend_device *, dev y, dev row, uint32_t n, uint32_t width)
{
    size_t floats = (size_t)n * width;
    LAUNCH_EACH("add_row", add_row_kernel, floats, y.address, row.address, floats, width);
}

static void cuda_add_scaled(backend_device *, dev y, dev x, float by, size_t n_floats)
{
    LAUNCH_EACH("add_scaled", add_scaled_kernel, n_floats, y.address, x.address, by, n_floats);
}

static void cuda_rope(backend_device *, dev y, dev x, dev cos_sin, const uint32_t *positions, uint32_t n,
                      uint32_t heads, uint32_t d, uint32_t rope_dim)
{
    size_t threads = (size_t)n * heads * (rope_dim / 2 + (d - rope_dim));
    const uint32_t *taken = n ? (const uint32_t *)gpu_take(positions, n * sizeof *positions) : NULL;
    LAUNCH_EACH("rope", rope_kernel, threads, y.address, x.address, cos_sin.address, taken, n, heads, d, rope_dim);
}

static void cuda_store_prefix(backend_device *, dev cache, uint32_t n_tokens, uint32_t first, dev values, uint32_t n,
                              uint32_t n_kv_heads, uint32_t d)
{
    if (n)
        LAUNCH("store_prefix", store_prefix_kernel, blocks_of((size_t)n * n_kv_heads * d, ROW_THREADS), ROW_THREADS,
               cache.address, n_tokens, first, values.address, n, n_kv_heads, d);
}

static void cuda_store_tail(backend_device *, dev cache, uint32_t capacity, const decode_row *rows, dev values,
                            uint32_t n, uint32_t n_kv_heads, uint32_t d)
{
    if (!n) return;
    const decode_row *taken = take_rows(rows, n);
    LAUNCH("store_tail", store_tail_kernel, blocks_of((size_t)n * n_kv_heads * d, ROW_THREADS), ROW_THREADS,
           cache.address, capacity, taken, values.address, n, n_kv_heads, d);
}

// --- products ---

// y [n,out] = x [n,in] w^T + beta y, row-major; to cuBLAS, whose matrices are column-major, it is y^T = w x^T.
static void product(float *y, const void *x, const void *w, int type, dev_matrix m, uint32_t n, float beta)
{
    const float one = 1.0f;
    if (!gpu_works()) return;
    int code = gpu.blas.gemm(gpu.blas.handle, BLAS_T, BLAS_N, (int)m.out, (int)n, (int)m.in, &one, w, type, (int)m.in,
                             x, type, (int)m.in, &beta, y, BLAS_F32, (int)m.out, BLAS_COMPUTE_F32, BLAS_GEMM_DEFAULT);
    if (code == 0) return;
    gpu.failed = kvb_fail(&gpu.error, code == 3 ? KVB_MEMORY : KVB_UNSUPPORTED,
                          "backend cuda: cuBLAS failed with status %d at a product of %u rows, %u in, %u out", code, n,
                          m.in, m.out);
}

// Rounds the input to one or two planes of bf16, like its weight, padded with rows of zeros to n_padded.
static const uint16_t *round_input(cuda_device *on, const float *x, uint32_t n, uint32_t n_padded, const dev_matrix *m)
{
    size_t elements = (size_t)n * m->in, padded = (size_t)n_padded * m->in;
    uint16_t *high = (uint16_t *)scratch_of(on, SCRATCH_ROUNDED, rounded_bytes(on->planes, n_padded, m->in));
    if (high)
        LAUNCH("to_bf16", to_bf16_kernel, blocks_of(padded, ROW_THREADS), ROW_THREADS, high,
               on->planes > 1 ? high + padded : NULL, x, elements, padded);
    return high;
}

// Multiplies n rows of x with the weight. y, and x if it is not rounded to bf16, have memory for n_padded rows.
static void multiply(cuda_device *on, float *y, const float *x, dev_matrix m, uint32_t n, uint32_t n_padded,
                     bool accumulate)
{
    float beta = accumulate ? 1.0f : 0.0f;
    if (!m.packed) {
        product(y, x, m.address, BLAS_F32, m, n_padded, beta);
        return;
    }
    const uint16_t *high = round_input(on, x, n, n_padded, &m), *values = (const uint16_t *)m.packed;
    if (!high) return;
    product(y, high, values, BLAS_BF16, m, n_padded, beta);
    if (on->planes < 2) return;
    // x w = (xh + xl) (wh + wl) without xl wl, which is about as small as what two parts leave out
    product(y, high, values + (size_t)m.out * m.in, BLAS_BF16, m, n_padded, 1.0f);
    product(y, high + (size_t)n_padded * m.in, values, BLAS_BF16, m, n_padded, 1.0f);
}

// Multiplies fewer than GROUP_ROWS rows as GROUP_ROWS of them; the others are zeros.
static void multiply_few(cuda_device *on, float *y, float *x, dev_matrix w, uint32_t n, bool accumulate)
{
    size_t in = (size_t)n * w.in, out = (size_t)n * w.out, all_in = (size_t)GROUP_ROWS * w.in,
           all_out = (size_t)GROUP_ROWS * w.out;
    float *padded_y = (float *)scratch_of(on, SCRATCH_PADDED, padded_bytes(w.out, w.in));
    if (!padded_y) return;
    dev from = {x}, to = {padded_y};
    if (!w.packed) { // bf16 pads when it rounds
        from.address = padded_y + all_out;
        cuda_copy(&on->base, from, {x}, in);
        cuda_clear(&on->base, dev_at(from, in), all_in - in);
    }
    if (accumulate) {
        cuda_copy(&on->base, to, {y}, out);
        cuda_clear(&on->base, dev_at(to, out), all_out - out);
    }
    multiply(on, padded_y, from.address, w, n, GROUP_ROWS, accumulate);
    cuda_copy(&on->base, {y}, to, out);
}

static void cuda_matmul(backend_device *on, dev y, dev x, dev_matrix w, uint32_t n, bool accumulate)
{
    if (n >= BACKEND_CHUNK_ROWS) {
        multiply(cuda_of(on), y.address, x.address, w, n, n, accumulate);
        return;
    }
    for (uint32_t at = 0; at < n; at += GROUP_ROWS) {
        float *to = y.address + (size_t)at * w.out, *from = x.address + (size_t)at * w.in;
        if (n - at < GROUP_ROWS) multiply_few(cuda_of(on), to, from, w, n - at, accumulate);
        else multiply(cuda_of(on), to, from, w, GROUP_ROWS, GROUP_ROWS, accumulate);
    }
}

static void cuda_project(backend_device *on, const projection *to, uint32_t count, dev x, uint32_t n)
{
    for (uint32_t i = 0; i < count; i++) cuda_matmul(on, to[i].y, x, to[i].w, n, false);
}
