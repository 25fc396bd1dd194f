// Attention, and what the oracle and scorers take from it, on a CUDA device: the launches of its kernels. All of it is
// float32 whatever the precision of products: a score enters an exponential, for which two parts of bf16 are not
// enough.
#pragma once
#include "profiler/backend/backend_cuda_attention.cuh"
#include "profiler/backend/backend_cuda_memory.cuh"

// Calls LAUNCH_FOR with the number of 64-wide chunks that a head needs, a constant that kernels are compiled for.
#define FOR_HEAD_CHUNKS(d, LAUNCH_FOR)      \
    do {                                    \
        if ((d) <= 64) LAUNCH_FOR(1);       \
        else if ((d) <= 128) LAUNCH_FOR(2); \
        else if ((d) <= 256) LAUNCH_FOR(4); \
        else LAUNCH_FOR(8);                 \
    } while (0)

static void cuda_attend_prefix(backend_device *, dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n,
                               attention_shape s)
{
    if (!n) return;
    dim3 grid(blocks_of(n, TILE), s.n_heads);
#define ATTEND_PREFIX(chunks)                                                                                      \
    LAUNCH("attend_prefix", attend_prefix_kernel<chunks>, grid, TILE_THREADS, o.address, q.address, kv->k.address, \
           kv->v.address, kv->n_tokens, first, n, s)
    FOR_HEAD_CHUNKS(s.head_dim, ATTEND_PREFIX);
#undef ATTEND_PREFIX
}

// Attends every row and head to every stretch of the context.
static void attend_stretches(const row_pass &pass)
{
    uint32_t G = pass.shape.n_kv_heads;
    dim3 grid(blocks_of((size_t)pass.n * (pass.shape.n_heads / G), TILE), G, pass.n_parts - 1);
#define ATTEND_STRETCH(chunks) LAUNCH("attend_stretch", attend_stretch_kernel<chunks>, grid, TILE_THREADS, pass)
    FOR_HEAD_CHUNKS(pass.shape.head_dim, ATTEND_STRETCH);
#undef ATTEND_STRETCH
}

static void observe_rows(const row_pass &pass, const oracle_view *oracle)
{
    uint32_t G = pass.shape.n_kv_heads;
    dim3 grid(blocks_of(pass.n_tokens, TILE), G, blocks_of((size_t)pass.n * (pass.shape.n_heads / G), TILE));
    LAUNCH("importance", importance_kernel, grid, TILE_THREADS, pass, oracle->best.address, oracle->best_stride,
           oracle->weights.address);
}

// Attends at most PASS_ROWS rows.
static void attend_pass(cuda_device *on, float *o, row_pass pass, const oracle_view *oracle)
{
    pass.stretch = stretch_of(pass.n_tokens);
    pass.n_parts = blocks_of(pass.n_tokens, pass.stretch) + 1;
    size_t heads = (size_t)pass.n * pass.shape.n_heads, all_lines = part_lines(pass.shape, pass.n_parts);
    float *memory = (float *)scratch_of(on, SCRATCH_PARTS, part_bytes(pass.shape, pass.n_parts));
    if (!memory) return;
    pass.top = memory;
    pass.sum = memory + all_lines;
    pass.values = memory + 2 * all_lines;
    attend_stretches(pass);
    LAUNCH("attend_tail", attend_tail_kernel, blocks_of(heads, LINE_WARPS), LINE_WARPS * WARP, pass);
    LAUNCH("merge_rows", merge_rows_kernel, blocks_of(heads, LINE_WARPS), LINE_WARPS * WARP, o, pass);
    if (oracle->weights.address) observe_rows(pass, oracle);
}

static void cuda_attend_rows(backend_device *on, dev o, dev q, const prefix_kv *kv, const tail_kv *tails,
                             const decode_row *rows, uint32_t n, attention_shape s, const oracle_view *oracle)
{
    if (!n) return;
    const decode_row *taken = take_rows(rows, n);
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
        attend_pass(cuda_of(on), o.address + offset, pass, oracle);
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
    LAUNCH("row_log", row_log_kernel, rows, TILE_THREADS, row_log.address, q.address, kv->k.address, T, first, s);
    LAUNCH("column_sums", column_sums_kernel, dim3(blocks_of(T, TILE), s.n_heads), TILE_THREADS, sums.address,
           row_log.address, q.address, kv->k.address, T, first, s);
}

static void cuda_output_norms(backend_device *, dev norms, const prefix_kv *kv, dev_matrix wo, attention_shape s)
{
    dim3 grid(blocks_of(kv->n_tokens, TILE), s.n_heads);
    LAUNCH("output_norms", output_norms_kernel, grid, TILE_THREADS, norms.address, kv->v.address, wo.address, wo.out,
           kv->n_tokens, s);
}
