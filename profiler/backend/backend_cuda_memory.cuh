// Memory of a CUDA device, and matrices: what goes to it and comes back.
#pragma once
extern "C" {
#include "profiler/backend/backend_cuda.h"
#include "profiler/backend/backend_host.h"
}
#include "profiler/backend/backend_cuda_weights.cuh"

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

static const float *cuda_host_view(backend_device *, dev from)
{
    (void)from;
    return NULL;
}

// All but an eighth: weights make room for what a run needs beside them (backend_cuda_weights.cuh).
static uint64_t cuda_free_bytes(backend_device *)
{
    size_t free_now = 0, all = 0;
    if (cudaMemGetInfo(&free_now, &all) != cudaSuccess) return 0;
    return all - all / 8;
}

static const decode_row *take_rows(const decode_row *rows, uint32_t n)
{
    return (const decode_row *)gpu_take(rows, n * sizeof *rows);
}

// float32 rows at `address` where there is no other form or somebody asked for rows; the planes of bf16 at `packed`.
static weight *rows_of(dev_matrix m)
{
    return (weight *)(void *)m.address;
}

static weight *operand_of(dev_matrix m)
{
    return m.packed ? (weight *)m.packed : rows_of(m);
}

static void matrix_free(dev_matrix *w)
{
    weight_release(rows_of(*w));
    weight_release((weight *)w->packed);
    w->address = NULL;
    w->packed = NULL;
}

static dev_matrix matrix_make(weight *rows, weight *packed, uint32_t out, uint32_t in, bool complete)
{
    dev_matrix m = {};
    m.address = (float *)(void *)rows;
    m.packed = packed;
    m.out = out;
    m.in = in;
    if (!complete) matrix_free(&m);
    return m;
}

static void cuda_matrix_release(backend_device *, dev_matrix *w)
{
    matrix_free(w);
}

static dev_matrix cuda_matrix_load(backend_device *on, const stored_matrix *w, unsigned hold)
{
    uint16_t planes = cuda_of(on)->planes;
    bool wants_rows = planes == 0 || hold & HOLD_ROWS;
    float *values = host_matrix_values(w, hold);
    weight *rows = values && wants_rows ? weight_new(values, w->out, w->in, 0) : NULL;
    weight *packed = values && planes ? weight_new(values, w->out, w->in, planes) : NULL;
    free(values);
    return matrix_make(rows, packed, w->out, w->in, (rows || !wants_rows) && (packed || !planes));
}

static uint64_t cuda_matrix_bytes(backend_device *on, const stored_matrix *w, unsigned hold)
{
    uint16_t planes = cuda_of(on)->planes;
    bool has_rows = planes == 0 || hold & HOLD_ROWS;
    return (uint64_t)w->out * w->in * (planes * sizeof(uint16_t) + (has_rows ? sizeof(float) : 0));
}

dev_matrix backend_cuda_random_matrix(backend_device *on, uint32_t out, uint32_t in, float scale, uint64_t seed)
{
    uint16_t planes = cuda_of(on)->planes;
    weight *rows = weight_new(NULL, out, in, 0), *packed = planes && rows ? weight_new(NULL, out, in, planes) : NULL;
    if (rows)
        LAUNCH("random", random_kernel, blocks_of(rows->elements, ROW_THREADS), ROW_THREADS, (float *)rows->memory,
               rows->elements, scale, seed);
    if (packed) {
        uint16_t *high = (uint16_t *)packed->memory;
        LAUNCH("to_bf16", to_bf16_kernel, blocks_of(rows->elements, ROW_THREADS), ROW_THREADS, high,
               planes > 1 ? high + packed->elements : NULL, (const float *)rows->memory, rows->elements,
               rows->elements);
        weight_release(rows); // the planes hold all of it
        rows = NULL;
    }
    return matrix_make(rows, packed, out, in, rows || packed);
}
