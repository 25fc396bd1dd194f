// Scratch memory of a CUDA device: one table of bytes, from which its size, its layout and its checks are made. It is
// taken once, when the device opens; what an operation needs beyond the limits that the device was opened with is
// refused before its first kernel.
#pragma once
#include "profiler/backend/backend_cuda_reduce.cuh"
#include "profiler/backend/backend_cuda_weights.cuh"

// Rows of a product, unless it is a whole chunk: one shape, one kernel, the same bits.
static constexpr uint32_t GROUP_ROWS = 64;
static constexpr uint32_t PASS_ROWS = 64;    // decoded rows per pass of attention: bounds its scratch
static constexpr uint32_t STRETCH_MIN = 256; // keys of a stretch of the context at least
static constexpr uint32_t STRETCHES_MAX = 64;
static constexpr uint32_t SAMPLE_ROWS = 4096; // per launch

static uint32_t stretch_of(uint32_t n_tokens)
{
    uint32_t each = (n_tokens + STRETCHES_MAX - 1) / STRETCHES_MAX;
    each = (each + TILE - 1) / TILE * TILE;
    return each < STRETCH_MIN ? STRETCH_MIN : each;
}

// Top, sum and values of every row and head in every part of a pass: the stretches of the context, and the tail.
static size_t part_lines(const attention_shape &s, uint32_t n_parts)
{
    return (size_t)n_parts * PASS_ROWS * s.n_heads;
}

static size_t part_bytes(const attention_shape &s, uint32_t n_parts)
{
    return part_lines(s, n_parts) * (s.head_dim + 2) * sizeof(float);
}

// Rows of a product's input, in the planes of its weight.
static size_t rounded_bytes(uint16_t planes, size_t rows, uint32_t in)
{
    return planes * rows * in * sizeof(uint16_t);
}

// Output and input of a product of few rows.
static size_t padded_bytes(uint32_t out, uint32_t in)
{
    return GROUP_ROWS * ((size_t)out + in) * sizeof(float);
}

// Partial sums of value_weights, and the factor behind them.
static size_t weight_sums_bytes(const attention_shape &s, uint32_t n_tokens)
{
    return ((size_t)blocks_of((size_t)s.n_heads * n_tokens, SUM_SPAN) + 1) * sizeof(double);
}

// Partial sums of moments.
static size_t mean_bytes(uint32_t heads, uint32_t d)
{
    return (size_t)heads * MEAN_SPANS * d * sizeof(double);
}

static size_t larger_of(size_t a, size_t b)
{
    return a > b ? a : b;
}

// THE table: each piece covers the largest of its users.
static void list_scratch(size_t bytes[SCRATCH_PIECES], const cuda_device *on, const backend_limits *limits)
{
    const attention_shape &s = limits->shape;
    bytes[SCRATCH_PARTS] = part_bytes(s, STRETCHES_MAX + 1);
    bytes[SCRATCH_ROUNDED] = rounded_bytes(on->planes, larger_of(limits->rows, GROUP_ROWS), limits->matrix_terms);
    bytes[SCRATCH_PADDED] = padded_bytes(limits->matrix_dim, limits->matrix_terms);
    bytes[SCRATCH_SUMS] = larger_of(larger_of(weight_sums_bytes(s, limits->tokens), mean_bytes(s.n_heads, s.head_dim)),
                                    SAMPLE_ROWS * sizeof(int32_t)); // sample
}

static uint64_t cuda_scratch_bytes(backend_device *on, const backend_limits *limits)
{
    size_t bytes[SCRATCH_PIECES];
    uint64_t all = 0;
    list_scratch(bytes, cuda_of(on), limits);
    for (int i = 0; i < SCRATCH_PIECES; i++) all += bytes[i];
    return all;
}

// False when there is no memory for it. Each piece is memory of its own, so that a tool that watches accesses sees one
// beyond its end.
static bool scratch_take(cuda_device *on, const backend_limits *limits)
{
    size_t bytes[SCRATCH_PIECES];
    list_scratch(bytes, on, limits);
    growing_release(&gpu.full); // the weights are there
    for (int i = 0; i < SCRATCH_PIECES; i++) {
        if (!bytes[i]) continue;
        on->scratch[i] = {gpu_memory(bytes[i]), bytes[i]};
        if (!on->scratch[i].memory) return false;
    }
    return !store.host_bytes || store.ring || ring_open();
}

// Weights that are streamed get all the memory that is left: the ring opens again with what there is then.
static void scratch_release(cuda_device *on)
{
    for (int i = 0; i < SCRATCH_PIECES; i++) gpu_free(on->scratch[i].memory);
    growing_release(&gpu.full);
    ring_release();
}

// A piece of at least `bytes`. NULL, and the operation has failed, where the device was opened for less.
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
