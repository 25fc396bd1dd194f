// Attention, what the oracle takes from it, and what scorers do, on a CUDA device: the launches of its kernels.
#pragma once
#include "profiler/backend/backend_cuda_memory.cuh"
#include "profiler/backend/backend_cuda_scratch.cuh"
#include "profiler/backend/backend_cuda_tensor.cuh"

// Column sums of a window of so few rows are cheap in float32, whatever the precision.
static constexpr uint32_t EXACT_ROWS = 256;

// Calls `launch` with the number of 64-wide chunks that a head needs, as a constant that kernels are compiled for.
#define FOR_HEAD_CHUNKS(d, LAUNCH_FOR)      \
    do {                                    \
        if ((d) <= 64) LAUNCH_FOR(1);       \
        else if ((d) <= 128) LAUNCH_FOR(2); \
        else if ((d) <= 256) LAUNCH_FOR(4); \
        else LAUNCH_FOR(8);                 \
    } while (0)

// The same for kernels on tensor cores.
#define FOR_MMA_CHUNKS(d, LAUNCH_FOR)       \
    do {                                    \
        if ((d) <= 64) LAUNCH_FOR(1);       \
        else if ((d) <= 128) LAUNCH_FOR(2); \
        else LAUNCH_FOR(4);                 \
    } while (0)

static uint32_t padded_dim(uint32_t d)
{
    return d <= 64 ? 64 : d <= 128 ? 128 : MMA_MAX_DIM;
}

// bf16: rounded keys, then values, for the tensor cores. Attention in f32 and bf16x3 reads keys and values as they are:
// a score enters an exponential, for which two parts of bf16 are not enough.
static size_t cuda_packed_floats(backend_device *on, uint32_t n_tokens, attention_shape s)
{
    bool packs = cuda_of(on)->planes == 1 && s.head_dim <= MMA_MAX_DIM;
    return packs ? (size_t)s.n_kv_heads * n_tokens * padded_dim(s.head_dim) : 0;
}

static void cuda_pack_prefix(backend_device *on, const prefix_kv *kv, attention_shape s)
{
    size_t lines = (size_t)s.n_kv_heads * kv->n_tokens;
    uint32_t padded = padded_dim(s.head_dim);
    if (lines && cuda_packed_floats(on, kv->n_tokens, s))
        LAUNCH("pack_prefix", pack_kernel, blocks_of(lines * padded, ROW_THREADS), ROW_THREADS,
               (uint32_t *)kv->packed.address, kv->k.address, kv->v.address, lines, s.head_dim, padded);
}

static packed_kv packed_of(const prefix_kv *kv, attention_shape s)
{
    const uint4 *k = (const uint4 *)kv->packed.address;
    return {k, k + (size_t)s.n_kv_heads * kv->n_tokens * padded_dim(s.head_dim) / 8};
}

static void cuda_attend_prefix(backend_device *, dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n,
                               attention_shape s)
{
    if (!n) return;
#define ATTEND_PREFIX_MMA(chunks)                                                                                 \
    LAUNCH_SHARED("attend_prefix", (attend_prefix_mma_kernel<chunks, MMA_TILES<chunks>>),                         \
                  dim3(blocks_of(n, 64 * MMA_TILES<chunks>), s.n_heads), MMA_THREADS,                             \
                  sizeof(mma_keys_and_values<chunks, MMA_TILES<chunks>>), o.address, q.address, packed_of(kv, s), \
                  kv->n_tokens, first, n, s)
    if (kv->packed.address) {
        FOR_MMA_CHUNKS(s.head_dim, ATTEND_PREFIX_MMA);
        return;
    }
#undef ATTEND_PREFIX_MMA
    dim3 grid(blocks_of(n, TILE), s.n_heads);
#define ATTEND_PREFIX(chunks)                                                                                      \
    LAUNCH("attend_prefix", attend_prefix_kernel<chunks>, grid, TILE_THREADS, o.address, q.address, kv->k.address, \
           kv->v.address, kv->n_tokens, first, n, s)
    FOR_HEAD_CHUNKS(s.head_dim, ATTEND_PREFIX);
#undef ATTEND_PREFIX
}

// Every row and head against every stretch of the context.
static void attend_stretches(const row_pass &pass, const packed_kv *packed)
{
    uint32_t G = pass.shape.n_kv_heads;
    dim3 grid(blocks_of((size_t)pass.n * (pass.shape.n_heads / G), TILE), G, pass.n_parts - 1);
#define ATTEND_STRETCH(chunks) LAUNCH("attend_stretch", attend_stretch_kernel<chunks>, grid, TILE_THREADS, pass)
#define ATTEND_STRETCH_MMA(chunks)                                                        \
    LAUNCH_SHARED("attend_stretch", attend_stretch_mma_kernel<chunks>, grid, MMA_THREADS, \
                  sizeof(mma_keys_and_values<chunks, 1>), pass, *packed)
    if (packed) FOR_MMA_CHUNKS(pass.shape.head_dim, ATTEND_STRETCH_MMA);
    else FOR_HEAD_CHUNKS(pass.shape.head_dim, ATTEND_STRETCH);
#undef ATTEND_STRETCH
#undef ATTEND_STRETCH_MMA
}

static void observe_rows(const row_pass &pass, const packed_kv *packed, const oracle_view *oracle)
{
    uint32_t G = pass.shape.n_kv_heads;
    dim3 grid(blocks_of(pass.n_tokens, packed ? IMPORTANCE_KEYS : TILE), G,
              blocks_of((size_t)pass.n * (pass.shape.n_heads / G), TILE));
#define IMPORTANCE_MMA(chunks)                                                                                       \
    LAUNCH_SHARED("importance", importance_mma_kernel<chunks>, grid, MMA_THREADS, sizeof(mma_keys<chunks, 1>), pass, \
                  *packed, oracle->best.address, oracle->best_stride, oracle->weights.address)
    if (packed) FOR_MMA_CHUNKS(pass.shape.head_dim, IMPORTANCE_MMA);
    else
        LAUNCH("importance", importance_kernel, grid, TILE_THREADS, pass, oracle->best.address, oracle->best_stride,
               oracle->weights.address);
#undef IMPORTANCE_MMA
}

// At most PASS_ROWS rows. packed: NULL where attention reads keys and values as they are.
static void attend_pass(cuda_device *on, float *o, row_pass pass, const packed_kv *packed, const oracle_view *oracle)
{
    pass.stretch = stretch_of(pass.n_tokens);
    pass.n_parts = blocks_of(pass.n_tokens, pass.stretch) + 1;
    size_t heads = (size_t)pass.n * pass.shape.n_heads, all_lines = part_lines(pass.shape, pass.n_parts);
    float *memory = (float *)scratch_of(on, SCRATCH_PARTS, part_bytes(pass.shape, pass.n_parts));
    if (!memory) return;
    pass.top = memory;
    pass.sum = memory + all_lines;
    pass.values = memory + 2 * all_lines;
    attend_stretches(pass, packed);
    LAUNCH("attend_tail", attend_tail_kernel, blocks_of(heads, LINE_WARPS), LINE_WARPS * WARP, pass);
    LAUNCH("merge_rows", merge_rows_kernel, blocks_of(heads, LINE_WARPS), LINE_WARPS * WARP, o, pass);
    if (oracle->weights.address) observe_rows(pass, packed, oracle);
}

static void cuda_attend_rows(backend_device *on, dev o, dev q, const prefix_kv *kv, const tail_kv *tails,
                             const decode_row *rows, uint32_t n, attention_shape s, const oracle_view *oracle)
{
    if (!n) return;
    const decode_row *taken = take_rows(rows, n);
    packed_kv packed = packed_of(kv, s);
    for (uint32_t at = 0; at < n; at += PASS_ROWS) {
        row_pass pass = {};
        size_t offset = (size_t)at * s.n_heads * s.head_dim;
        pass.q = q.address + offset;
        pass.k = kv->k.address;
        pass.v = kv->v.address;
        pass.tail_k = tails->k.address;
        pass.tail_v = tails->v.address;
        pass.rows = taken ? taken + at : NULL;
        pass.n = n - at < PASS_ROWS ? n - at : PASS_ROWS;
        pass.n_tokens = kv->n_tokens;
        pass.capacity = tails->capacity;
        pass.shape = s;
        attend_pass(cuda_of(on), o.address + offset, pass, kv->packed.address ? &packed : NULL, oracle);
    }
}

static void cuda_value_weights(backend_device *on, dev w, const prefix_kv *kv, dev root, dev centre, attention_shape s)
{
    (void)centre; // {NULL}: this backend does not sum importance
    size_t n = (size_t)s.n_heads * kv->n_tokens;
    unsigned spans = blocks_of(n, SUM_SPAN);
    double *partial = (double *)scratch_of(cuda_of(on), SCRATCH_SUMS, weight_sums_bytes(s, kv->n_tokens));
    if (!partial) return;
    float *factor = (float *)(partial + spans);
    dim3 grid(blocks_of(kv->n_tokens, TILE), s.n_heads);
    LAUNCH("value_norms", value_norms_kernel, grid, TILE_THREADS, w.address, kv->v.address, root.address, kv->n_tokens,
           s);
    LAUNCH("sum", sum_kernel, spans, ROW_THREADS, partial, w.address, n);
    LAUNCH("sum", inverse_kernel, 1, ROW_THREADS, factor, partial, spans);
    LAUNCH("scale", scale_kernel, blocks_of(n, ROW_THREADS), ROW_THREADS, w.address, n, factor);
}

static void cuda_column_sums(backend_device *, dev sums, dev row_log, dev q, const prefix_kv *kv, uint32_t first,
                             attention_shape s)
{
    uint32_t T = kv->n_tokens;
    dim3 rows(blocks_of(T - first, TILE), s.n_heads);
#define COLUMN_SUMS_MMA(chunks)                                                                                       \
    do {                                                                                                              \
        LAUNCH_SHARED("row_log", row_log_mma_kernel<chunks>, rows, MMA_THREADS, sizeof(mma_keys<chunks, 1>),          \
                      row_log.address, q.address, packed_of(kv, s), T, first, s);                                     \
        LAUNCH_SHARED("column_sums", column_sums_mma_kernel<chunks>, dim3(blocks_of(T, MMA_KEYS<chunks>), s.n_heads), \
                      MMA_THREADS, sizeof(mma_keys<chunks, 1>), sums.address, row_log.address, q.address,             \
                      packed_of(kv, s), T, first, s);                                                                 \
    } while (0)
    if (kv->packed.address && T - first > EXACT_ROWS) {
        FOR_MMA_CHUNKS(s.head_dim, COLUMN_SUMS_MMA);
        return;
    }
#undef COLUMN_SUMS_MMA
    LAUNCH("row_log", row_log_kernel, rows, TILE_THREADS, row_log.address, q.address, kv->k.address, T, first, s);
    LAUNCH("column_sums", column_sums_kernel, dim3(blocks_of(T, TILE), s.n_heads), TILE_THREADS, sums.address,
           row_log.address, q.address, kv->k.address, T, first, s);
}

static void cuda_output_norms(backend_device *, dev norms, const prefix_kv *kv, dev_matrix wo, attention_shape s)
{
    weight *w = rows_of(wo);
    const float *rows = (const float *)weight_get(w);
    dim3 grid(blocks_of(kv->n_tokens, TILE), s.n_heads);
    LAUNCH("output_norms", output_norms_kernel, grid, TILE_THREADS, norms.address, kv->v.address, rows, wo.out,
           kv->n_tokens, s);
    weight_used(w);
}

// --- reductions for scorers ---

static void cuda_norms(backend_device *, dev out, dev x, size_t n, uint32_t width)
{
    if (n)
        LAUNCH("norms", norms_kernel, blocks_of(n, ROW_THREADS / WARP), ROW_THREADS, out.address, x.address, n, width);
}

static void cuda_moments(backend_device *on, dev mean, dev covariance, dev x, dev norms, uint32_t n, uint32_t heads,
                         uint32_t d, bool by_head)
{
    head_rows rows = {x.address, by_head ? (size_t)n * d : d, by_head ? d : (size_t)heads * d, n, d};
    uint32_t tiles = blocks_of(d, TILE);
    double *partial = (double *)scratch_of(cuda_of(on), SCRATCH_SUMS, mean_bytes(heads, d));
    if (!partial) return;
    LAUNCH("mean", mean_spans_kernel, dim3(MEAN_SPANS, heads), ROW_THREADS, partial, rows, norms.address);
    LAUNCH("mean", mean_kernel, heads, ROW_THREADS, mean.address, partial, n, d);
    if (covariance.address)
        LAUNCH("covariance", covariance_kernel, dim3(tiles * tiles, heads), TILE_THREADS, covariance.address,
               mean.address, rows);
}

static void cuda_quadratic(backend_device *, dev out, const prefix_kv *kv, dev linear, dev square, attention_shape s)
{
    LAUNCH("quadratic", quadratic_kernel, dim3(blocks_of(kv->n_tokens, TILE), s.n_heads), TILE_THREADS, out.address,
           kv->k.address, linear.address, square.address, kv->n_tokens, s);
}

static void cuda_spreads(backend_device *, dev out, dev z, uint32_t n_tokens, uint32_t n_kv_heads, uint32_t d,
                         partition_row row)
{
    if (row.count)
        LAUNCH("spreads", spreads_kernel, dim3(row.count, n_kv_heads), ROW_THREADS, out.address, z.address, n_tokens, d,
               row);
}
