// Memory of a CUDA device: transfers, matrices, and scratch memory, whose size, layout and checks come from one table
// of bytes. It is taken once, when the device opens; what an operation needs beyond the limits that the device was
// opened with is refused before its first kernel.
#pragma once
extern "C" {
#include "profiler/backend/backend_host.h"
}
#include "profiler/backend/backend_cuda_device.cuh"
#include "profiler/backend/backend_cuda_rows.cuh"

static dev cuda_alloc(backend_device *, size_t n_floats)
{
    dev memory = {NULL};
    if (n_floats > SIZE_MAX / sizeof(float)) return memory;
    size_t bytes = n_floats ? n_floats * sizeof(float) : 16;
    memory.address = (float *)gpu_memory(bytes);
    if (memory.address) gpu_note(cudaMemsetAsync(memory.address, 0, bytes, gpu.stream), "clearing memory");
    return memory;
}

static void cuda_release(backend_device *, dev memory)
{
    gpu_free(memory.address);
}

static void cuda_upload(backend_device *, dev to, const float *from, size_t n)
{
    if (!n || !gpu_works()) return;
    gpu_note(cudaMemcpyAsync(to.address, from, n * sizeof(float), cudaMemcpyHostToDevice, gpu.stream), "upload");
    gpu_note(cudaStreamSynchronize(gpu.stream), "upload"); // `from` is the caller's again
}

static void cuda_download(backend_device *, float *to, dev from, size_t n)
{
    if (n && gpu_works()) {
        gpu_note(cudaMemcpyAsync(to, from.address, n * sizeof(float), cudaMemcpyDeviceToHost, gpu.stream), "download");
        gpu_note(cudaStreamSynchronize(gpu.stream), "download, or a kernel before it");
    }
    if (!gpu_works()) memset(to, 0, n * sizeof(float));
}

static void cuda_copy(backend_device *, dev to, dev from, size_t n)
{
    if (n && gpu_works())
        gpu_note(cudaMemcpyAsync(to.address, from.address, n * sizeof(float), cudaMemcpyDeviceToDevice, gpu.stream),
                 "copy");
}

static void cuda_clear(backend_device *, dev memory, size_t n)
{
    if (n && gpu_works()) gpu_note(cudaMemsetAsync(memory.address, 0, n * sizeof(float), gpu.stream), "clear");
}

static const float *cuda_view(backend_device *, dev from)
{
    (void)from;
    return NULL;
}

// Returns the free bytes less an eighth, which is left for what a plan does not count.
static uint64_t cuda_free_bytes(backend_device *)
{
    size_t free_now = 0, all = 0;
    if (cudaMemGetInfo(&free_now, &all) != cudaSuccess) return 0;
    return free_now - free_now / 8;
}

static const decode_row *take_rows(const decode_row *rows, uint32_t n)
{
    return (const decode_row *)gpu_take(rows, n * sizeof *rows);
}

// ---- Matrices: float32 rows at `address` where there is no other form or somebody asked for rows; at `packed` one or
// two planes of bfloat16, the second what the first lost ----

static constexpr size_t UPLOAD_ELEMENTS = 1 << 24; // converted at a time

// Uploads n host values as planes of bfloat16. Returns NULL if memory runs out.
static uint16_t *upload_planes(backend_device *on, const float *values, size_t n, uint16_t planes)
{
    size_t each = n < UPLOAD_ELEMENTS ? n : UPLOAD_ELEMENTS;
    uint16_t *high = (uint16_t *)gpu_memory(n * planes * sizeof *high), *low = planes > 1 ? high + n : NULL;
    dev full = high ? cuda_alloc(on, each) : dev{NULL};
    for (size_t at = 0; full.address && at < n; at += each) {
        size_t count = n - at < each ? n - at : each;
        cuda_upload(on, full, values + at, count);
        LAUNCH("to_bf16", to_bf16_kernel, blocks_of(count, ROW_THREADS), ROW_THREADS, high + at, low ? low + at : NULL,
               full.address, count, count);
    }
    cuda_release(on, full);
    if (full.address && gpu_works()) return high;
    gpu_free(high);
    return NULL;
}

static void cuda_matrix_release(backend_device *, dev_matrix *w)
{
    gpu_free(w->address);
    gpu_free(w->packed);
    w->address = NULL;
    w->packed = NULL;
}

static dev_matrix cuda_matrix_load(backend_device *on, const stored_matrix *w, unsigned hold)
{
    uint16_t planes = cuda_of(on)->planes;
    size_t n = (size_t)w->out * w->in;
    dev_matrix m = {};
    m.out = w->out;
    m.in = w->in;
    float *values = host_matrix_values(w);
    bool ok = values != NULL;
    if (ok && (planes == 0 || hold & HOLD_ROWS)) {
        m.address = (float *)gpu_memory(n * sizeof(float));
        if (m.address) cuda_upload(on, {m.address}, values, n);
        ok = m.address && gpu_works();
    }
    if (ok && planes) {
        m.packed = upload_planes(on, values, n, planes);
        ok = m.packed != NULL;
    }
    free(values);
    if (!ok) cuda_matrix_release(on, &m);
    return m;
}

static uint64_t cuda_matrix_bytes(backend_device *on, const stored_matrix *w, unsigned hold)
{
    uint16_t planes = cuda_of(on)->planes;
    bool has_rows = planes == 0 || hold & HOLD_ROWS;
    return (uint64_t)w->out * w->in * (planes * sizeof(uint16_t) + (has_rows ? sizeof(float) : 0));
}

// ---- Scratch memory ----

// Rows of a product, unless it is a whole chunk: one shape, one kernel, the same bits.
static constexpr uint32_t GROUP_ROWS = 64;
static constexpr uint32_t PASS_ROWS = 64;    // decoded rows per pass of attention: bounds its scratch
static constexpr uint32_t STRETCH_MIN = 256; // the fewest keys of a stretch of the context
static constexpr uint32_t STRETCHES_MAX = 64;
static constexpr uint32_t SAMPLE_ROWS = 4096; // per launch

static uint32_t stretch_of(uint32_t n_tokens)
{
    uint32_t each = (n_tokens + STRETCHES_MAX - 1) / STRETCHES_MAX;
    each = (each + TILE - 1) / TILE * TILE;
    return each < STRETCH_MIN ? STRETCH_MIN : each;
}

// Lines, each with top, sum and values: every row and head in every part of a pass (stretches of the context, tail).
static size_t part_lines(const attention_shape &s, uint32_t n_parts)
{
    return (size_t)n_parts * PASS_ROWS * s.n_heads;
}

static size_t part_bytes(const attention_shape &s, uint32_t n_parts)
{
    return part_lines(s, n_parts) * (s.head_dim + 2) * sizeof(float);
}

// Bytes of rows of a product's input, in as many planes as its weight.
static size_t rounded_bytes(uint16_t planes, size_t rows, uint32_t in)
{
    return planes * rows * in * sizeof(uint16_t);
}

// Bytes of output and input of a product of few rows.
static size_t padded_bytes(uint32_t out, uint32_t in)
{
    return GROUP_ROWS * ((size_t)out + in) * sizeof(float);
}

// Bytes of the partial sums of value_weights, and of the factor behind them.
static size_t weight_sums_bytes(const attention_shape &s, uint32_t n_tokens)
{
    return ((size_t)blocks_of((size_t)s.n_heads * n_tokens, SUM_SPAN) + 1) * sizeof(double);
}

static size_t larger_of(size_t a, size_t b)
{
    return a > b ? a : b;
}

// The table: each piece covers the largest of its users.
static void list_scratch(size_t bytes[SCRATCH_PIECES], const cuda_device *on, const backend_limits *limits)
{
    const attention_shape &s = limits->shape;
    bytes[SCRATCH_PARTS] = part_bytes(s, STRETCHES_MAX + 1);
    bytes[SCRATCH_ROUNDED] = rounded_bytes(on->planes, larger_of(limits->rows, GROUP_ROWS), limits->matrix_terms);
    bytes[SCRATCH_PADDED] = padded_bytes(limits->matrix_dim, limits->matrix_terms);
    bytes[SCRATCH_SUMS] = larger_of(weight_sums_bytes(s, limits->tokens), SAMPLE_ROWS * sizeof(int32_t));
}

static uint64_t cuda_scratch_bytes(backend_device *on, const backend_limits *limits)
{
    size_t bytes[SCRATCH_PIECES];
    uint64_t all = 0;
    list_scratch(bytes, cuda_of(on), limits);
    for (int i = 0; i < SCRATCH_PIECES; i++) all += bytes[i];
    return all;
}

// Returns false if memory runs out. Each piece is an allocation of its own, so that memory checkers notice an access
// beyond its end.
static bool scratch_take(cuda_device *on, const backend_limits *limits)
{
    size_t bytes[SCRATCH_PIECES];
    list_scratch(bytes, on, limits);
    for (int i = 0; i < SCRATCH_PIECES; i++) {
        if (!bytes[i]) continue;
        on->scratch[i] = {gpu_memory(bytes[i]), bytes[i]};
        if (!on->scratch[i].memory) return false;
    }
    return true;
}

static void scratch_release(cuda_device *on)
{
    for (int i = 0; i < SCRATCH_PIECES; i++) gpu_free(on->scratch[i].memory);
}

// Returns a piece of at least `bytes`. If the device was opened for less, the operation fails and this returns NULL.
static void *scratch_of(cuda_device *on, scratch_use use, size_t bytes)
{
    static const char *const names[SCRATCH_PIECES] = {"parts of attention", "a product's input",
                                                      "a product of few rows", "partial sums"};
    const device_piece *piece = &on->scratch[use];
    if (piece->memory && bytes <= piece->bytes) return piece->memory;
    backend_fail(&on->base, KVB_ARGUMENT, "backend cuda: %s: %zu bytes of scratch, opened for %zu", names[use], bytes,
                 piece->bytes);
    return NULL;
}
