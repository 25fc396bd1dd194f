// The CPU backend: oneDNN for matrix products, OpenMP over heads and rows, loops that the compiler vectorises per CPU.
// One table of operations per precision of the products; backend_cpu.h says what keeps their bits the same.
#include "profiler/backend/backend_cpu.h"
#include "profiler/backend/meter.h"
#include "profiler/backend/packed_tiles.h"
#include "runtime/fail.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

static void cpu_close(backend_device *on)
{
    if (!on) return;
    cpu_scratch_release(cpu_of(on));
    free(on);
}

static precision precision_of(const backend *b)
{
    precision p = PRECISION_F32;
    while (strcmp(precision_name(p), b->compute) != 0) p++;
    return p;
}

static kvb_status cpu_open(backend_device **out, const backend *b, const backend_limits *limits, kvb_error *err)
{
    *out = NULL;
    cpu_device *on = calloc(1, sizeof *on);
    if (!on) return kvb_fail(err, KVB_MEMORY, "backend %s: no memory", b->name);
    *on = (cpu_device){.base.b = b, .p = precision_of(b), .n_threads = omp_get_max_threads()};
    if (limits && !cpu_scratch_take(on, limits)) {
        cpu_close(&on->base);
        return kvb_fail(err, KVB_MEMORY, "backend %s: no memory for its scratch at %u tokens", b->name, limits->tokens);
    }
    *out = &on->base;
    return KVB_OK;
}

static void cpu_gather(backend_device *on, dev y, dev_matrix table, const int32_t *ids, uint32_t n)
{
    (void)on;
    for (uint32_t i = 0; i < n; i++)
        cpu_matrix_rows(y.address + (size_t)i * table.in, &table, (uint32_t)ids[i], 1, 0, table.in);
}

static void cpu_rms_norm(backend_device *on, dev y, dev x, dev weight, uint32_t n, uint32_t width, float eps)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        loop_rms_norm(y.address + (size_t)i * width, x.address + (size_t)i * width, weight.address, width, eps);
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_layer_norm(backend_device *on, dev y, dev x, dev weight, uint32_t n, uint32_t width, uint32_t n_weights,
                           float eps)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        loop_layer_norm(y.address + (size_t)i * width, x.address + (size_t)i * width,
                        weight.address + (size_t)(i % n_weights) * width, width, eps);
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

enum { LOOP_CHUNK = 16384 }; // floats that a thread takes at a time where rows do not matter

static void cpu_glu(backend_device *on, dev gate, dev up, activation act, size_t n_floats)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n_floats; i += LOOP_CHUNK)
        loop_glu(gate.address + i, up.address + i, act, n_floats - i < LOOP_CHUNK ? n_floats - i : LOOP_CHUNK);
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_softcap(backend_device *on, dev y, float cap, size_t n_floats)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n_floats; i += LOOP_CHUNK)
        loop_softcap(y.address + i, n_floats - i < LOOP_CHUNK ? n_floats - i : LOOP_CHUNK, cap);
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_clip(backend_device *on, dev y, float most, size_t n_floats)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n_floats; i++) {
        float x = y.address[i];
        y.address[i] = x > most ? most : x < -most ? -most : x;
    }
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

// What follows is bound by memory: plain loops over pieces that are cut by size alone.
static void cpu_scale(backend_device *on, dev y, float by, size_t n_floats)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n_floats; i++) y.address[i] *= by;
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_add_row(backend_device *on, dev y, dev row, uint32_t n, uint32_t width)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t c = 0; c < width; c++) y.address[(size_t)i * width + c] += row.address[c];
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_add_scaled(backend_device *on, dev y, dev x, float by, size_t n_floats)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n_floats; i++) y.address[i] += by * x.address[i];
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_take_rows(backend_device *on, dev y, dev x, const uint32_t *rows, uint32_t n, uint32_t width)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        memcpy(y.address + (size_t)i * width, x.address + (size_t)rows[i] * width, width * sizeof(float));
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_add_rows(backend_device *on, dev y, dev x, const uint32_t *rows, const float *weights, uint32_t n,
                         uint32_t width)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++) {
        float *to = y.address + (size_t)rows[i] * width, weight = weights[i];
        const float *from = x.address + (size_t)i * width;
#pragma omp simd
        for (uint32_t c = 0; c < width; c++) to[c] += weight * from[c];
    }
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_rope(backend_device *on, dev y, dev x, dev cos_sin, const uint32_t *positions, uint32_t n,
                     uint32_t heads, uint32_t d, uint32_t rope_dim)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        loop_rope(y.address + (size_t)i * heads * d, x.address + (size_t)i * heads * d,
                  cos_sin.address + (size_t)positions[i] * rope_dim, heads, d, rope_dim);
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_store_prefix(backend_device *on, dev cache, uint32_t n_tokens, uint32_t first, dev values, uint32_t n,
                             uint32_t n_kv_heads, uint32_t d)
{
    (void)on;
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t g = 0; g < n_kv_heads; g++)
            memcpy(cache.address + ((size_t)g * n_tokens + first + i) * d,
                   values.address + ((size_t)i * n_kv_heads + g) * d, d * sizeof(float));
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_store_tail(backend_device *on, dev cache, uint32_t capacity, const decode_row *rows, dev values,
                           uint32_t n, uint32_t n_kv_heads, uint32_t d)
{
    (void)on;
    double start = meter_now();
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t g = 0; g < n_kv_heads; g++)
            memcpy(cache.address + (((size_t)rows[i].question * n_kv_heads + g) * capacity + rows[i].tail) * d,
                   values.address + ((size_t)i * n_kv_heads + g) * d, d * sizeof(float));
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

// One table for each precision of the products.
#define CPU_BACKEND(COMPUTE, SUMMARY)                                                                                  \
    {                                                                                                                  \
        .name = "cpu", .compute = COMPUTE, .summary = SUMMARY, .context_rows = CONTEXT_ROWS, .open = cpu_open,         \
        .sums_importance = true, .close = cpu_close, .check = cpu_check, .alloc = host_alloc, .release = host_release, \
        .upload = host_upload, .download = host_download, .copy = host_copy, .clear = host_clear,                      \
        .host_view = host_view, .matrix_load = cpu_matrix_load, .matrix_bytes = cpu_matrix_bytes,                      \
        .matrix_release = cpu_matrix_release, .scratch_bytes = cpu_scratch_bytes, .free_bytes = host_free_bytes,       \
        .packed_floats = cpu_packed_floats, .pack_prefix = cpu_pack_prefix, .gather = cpu_gather,                      \
        .rms_norm = cpu_rms_norm, .matmul = cpu_matmul, .project = cpu_project, .layer_norm = cpu_layer_norm,          \
        .glu = cpu_glu, .softcap = cpu_softcap, .clip = cpu_clip, .take_rows = cpu_take_rows,                          \
        .add_rows = cpu_add_rows, .scale = cpu_scale, .add_row = cpu_add_row, .add_scaled = cpu_add_scaled,            \
        .rope = cpu_rope, .store_prefix = cpu_store_prefix, .store_tail = cpu_store_tail,                              \
        .attend_prefix = cpu_attend_prefix, .attend_rows = cpu_attend_rows, .value_weights = cpu_value_weights,        \
        .sample = host_sample, .column_sums = cpu_column_sums, .output_norms = cpu_output_norms, .norms = host_norms,  \
        .moments = host_moments, .quadratic = host_quadratic, .spreads = host_spreads,                                 \
    }

const backend backend_cpu = CPU_BACKEND("f32", "oneDNN and OpenMP, float32");
const backend backend_cpu_bf16x3 = CPU_BACKEND("bf16x3", "as cpu, products of operands in two bfloat16 parts");
const backend backend_cpu_bf16 = CPU_BACKEND("bf16", "as cpu, products of operands rounded to bfloat16");
