// The CPU backend: oneDNN for matrix products, OpenMP over heads and rows, loops that the compiler vectorises per CPU. One table of
// operations per precision of the products; backend_cpu.h says what keeps their bits the same.
#include "profiler/backend_cpu.h"
#include "profiler/meter.h"
#include "profiler/model.h"
#include "profiler/packed_tiles.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

cpu_pool pool;

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

// How cpu_reserve cuts its block; in floats.
typedef struct scratch_sizes {
    size_t lines;                                  // of one task of attention
    size_t scores, tails, queries, weights, panel; // of the arrays in struct scratch
    size_t split_keys, split_values;
    size_t each, operand;               // of one thread; of pool.operand
    size_t exponentials, parts, values; // of pool.exponentials, part_sum and part_values
    size_t all;
} scratch_sizes;

static scratch_sizes sizes_of(precision p, const backend_limits *limits)
{
    size_t d = limits->shape.head_dim;
    scratch_sizes s = {.lines = cpu_max_lines(limits->shape)};
    uint32_t block = cpu_block_lines((uint32_t)s.lines);
    s.scores = max_size(max_size(QUERY_TILE, block) * KEY_TILE, VALUE_TILE * d);
    if (!operand_is_plain(p)) {
        s.scores = max_size(s.scores, packed_temp_floats((uint32_t)d, KEY_TILE) + KEY_TILE * d);
        s.queries = operand_bytes(p, (uint32_t)s.lines, (uint32_t)d) / sizeof(float);
        s.weights = operand_bytes(p, block, KEY_TILE) / sizeof(float);
    }
    if (tiles_available() && p != PRECISION_BF16) { // bf16x3 has three parts where products are small
        s.split_keys = tiles_split_bytes(3, (uint32_t)d, KEY_TILE) / sizeof(float);
        s.split_values = tiles_split_bytes(3, KEY_TILE, (uint32_t)d) / sizeof(float);
    }
    s.scores = (s.scores + 15) / 16 * 16;
    s.tails = limits->tail;
    s.panel = PRODUCT_ROWS_MAX * PANEL;
    s.each = s.scores + s.tails + 2 * s.lines * d + 2 * s.lines + s.panel + s.queries + s.weights + s.split_keys +
             s.split_values;
    s.each = (s.each + 15) / 16 * 16;
    // A block of the widest rows: many blocks of those that most matrices have. oneDNN has two; in float32 it uses rows where they are.
    s.operand = operand_bytes(p, PRODUCT_ROWS_MAX, limits->matrix_dim) / sizeof(float);
    if (tiles_available()) s.operand = max_size(s.operand, OPERAND_BYTES / sizeof(float));
    else if (!operand_is_plain(p)) s.operand *= 2;
    size_t lines = cpu_row_group() * limits->shape.n_heads;
    s.exponentials = (cpu_exponential_floats(p, limits->tokens, limits->shape) + 15) / 16 * 16;
    s.parts = (lines * ((limits->tokens + KEY_TILE - 1) / KEY_TILE) + 15) / 16 * 16;
    s.values = s.parts * d;
    s.all = s.each * (size_t)omp_get_max_threads() + s.operand + s.exponentials + 2 * s.parts + s.values;
    return s;
}

static uint64_t cpu_scratch_bytes(precision p, const backend_limits *limits)
{
    return sizes_of(p, limits).all * sizeof(float);
}

static bool cpu_reserve(precision p, const backend_limits *limits)
{
    free(pool.threads);
    free(pool.block);
    memset(&pool, 0, sizeof pool);
    if (!limits->tokens) return true;
    scratch_sizes sizes = sizes_of(p, limits);
    size_t tile = sizes.lines * limits->shape.head_dim;
    pool.operand_bytes = sizes.operand * sizeof(float);
    pool.n_threads = omp_get_max_threads();
    pool.threads = calloc((size_t)pool.n_threads, sizeof *pool.threads);
    pool.block = host_alloc(sizes.all).address;
    if (!pool.threads || !pool.block) return false;
    pool.operand = pool.block;
    pool.exponentials = (float *)pool.block + sizes.operand;
    pool.part_scale = pool.exponentials + sizes.exponentials;
    pool.part_sum = pool.part_scale + sizes.parts;
    pool.part_values = pool.part_sum + sizes.parts;
    float *at = pool.part_values + sizes.values;
    for (int t = 0; t < pool.n_threads; t++, at += sizes.each) {
        scratch *s = &pool.threads[t];
        s->scores = at;
        s->query_operand = at + sizes.scores;
        s->weight_operand = at + sizes.scores + sizes.queries;
        s->split_keys = at + sizes.scores + sizes.queries + sizes.weights;
        s->split_values = (float *)s->split_keys + sizes.split_keys;
        s->panel = (float *)s->split_values + sizes.split_values;
        s->queries = s->panel + sizes.panel;
        s->outputs = s->queries + tile;
        s->row_max = s->outputs + tile;
        s->row_sum = s->row_max + sizes.lines;
        s->tails = s->row_sum + sizes.lines;
    }
    return true;
}

static void cpu_gather(dev y, dev_matrix table, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        cpu_matrix_rows(y.address + (size_t)i * table.in, &table, (uint32_t)ids[i], 1, 0, table.in);
}

static void cpu_rms_norm(dev y, dev x, dev weight, uint32_t n, uint32_t width, float eps)
{
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        loop_rms_norm(y.address + (size_t)i * width, x.address + (size_t)i * width, weight.address, width, eps);
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_swiglu(dev gate, dev up, size_t n_floats)
{
    double start = meter_now();
    enum { CHUNK = 16384 };
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n_floats; i += CHUNK)
        loop_swiglu(gate.address + i, up.address + i, n_floats - i < CHUNK ? n_floats - i : CHUNK);
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_rope(dev y, dev x, dev cos_sin, const uint32_t *positions, uint32_t n, uint32_t heads, uint32_t d,
                     uint32_t rope_dim)
{
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        loop_rope(y.address + (size_t)i * heads * d, x.address + (size_t)i * heads * d,
                  cos_sin.address + (size_t)positions[i] * rope_dim, heads, d, rope_dim);
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_store_prefix(dev cache, uint32_t n_tokens, uint32_t first, dev values, uint32_t n, uint32_t n_kv_heads,
                             uint32_t d)
{
    double start = meter_now();
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t g = 0; g < n_kv_heads; g++)
            memcpy(cache.address + ((size_t)g * n_tokens + first + i) * d,
                   values.address + ((size_t)i * n_kv_heads + g) * d, d * sizeof(float));
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

static void cpu_store_tail(dev cache, uint32_t capacity, const decode_row *rows, dev values, uint32_t n,
                           uint32_t n_kv_heads, uint32_t d)
{
    double start = meter_now();
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t g = 0; g < n_kv_heads; g++)
            memcpy(cache.address + (((size_t)rows[i].question * n_kv_heads + g) * capacity + rows[i].tail) * d,
                   values.address + ((size_t)i * n_kv_heads + g) * d, d * sizeof(float));
    meter_add_parallel(METER_ROWS, start, omp_get_max_threads());
}

// The operations whose numbers depend on the precision, and the table of one precision.
#define CPU_BACKEND(SUFFIX, PRECISION, COMPUTE, SUMMARY)                                                             \
    static dev_matrix matrix_upload##SUFFIX(const float *w, uint32_t out, uint32_t in, bool keep_rows)               \
    {                                                                                                                \
        return cpu_matrix_upload(PRECISION, w, out, in, keep_rows);                                                  \
    }                                                                                                                \
    static dev_matrix matrix_load##SUFFIX(const stored_matrix *w, bool keep_rows)                                    \
    {                                                                                                                \
        return cpu_matrix_load(PRECISION, w, keep_rows);                                                             \
    }                                                                                                                \
    static bool reserve##SUFFIX(const backend_limits *limits)                                                        \
    {                                                                                                                \
        return cpu_reserve(PRECISION, limits);                                                                       \
    }                                                                                                                \
    static uint64_t scratch_bytes##SUFFIX(const backend_limits *limits)                                              \
    {                                                                                                                \
        return cpu_scratch_bytes(PRECISION, limits);                                                                 \
    }                                                                                                                \
    static size_t packed_floats##SUFFIX(uint32_t n_tokens, attention_shape s)                                        \
    {                                                                                                                \
        return cpu_packed_floats(PRECISION, n_tokens, s);                                                            \
    }                                                                                                                \
    static void pack_prefix##SUFFIX(const prefix_kv *kv, attention_shape s)                                          \
    {                                                                                                                \
        cpu_pack_prefix(PRECISION, kv, s);                                                                           \
    }                                                                                                                \
    static void attend_prefix##SUFFIX(dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n,                 \
                                      attention_shape s)                                                             \
    {                                                                                                                \
        cpu_attend_prefix(PRECISION, o, q, kv, first, n, s);                                                         \
    }                                                                                                                \
    static void attend_rows##SUFFIX(dev o, dev q, const prefix_kv *kv, const tail_kv *tails, const decode_row *rows, \
                                    uint32_t n, attention_shape s, const oracle_view *oracle)                        \
    {                                                                                                                \
        cpu_attend_rows(PRECISION, o, q, kv, tails, rows, n, s, oracle);                                             \
    }                                                                                                                \
    const backend backend_cpu##SUFFIX = {                                                                            \
        .name = "cpu",                                                                                               \
        .compute = COMPUTE,                                                                                          \
        .summary = SUMMARY,                                                                                          \
        .context_rows = CONTEXT_ROWS,                                                                                \
        .open = host_open,                                                                                           \
        .check = host_check,                                                                                         \
        .alloc = host_alloc,                                                                                         \
        .release = host_release,                                                                                     \
        .upload = host_upload,                                                                                       \
        .download = host_download,                                                                                   \
        .copy = host_copy,                                                                                           \
        .clear = host_clear,                                                                                         \
        .host_view = host_view,                                                                                      \
        .matrix_upload = matrix_upload##SUFFIX,                                                                      \
        .matrix_load = matrix_load##SUFFIX,                                                                          \
        .matrix_release = cpu_matrix_release,                                                                        \
        .reserve = reserve##SUFFIX,                                                                                  \
        .scratch_bytes = scratch_bytes##SUFFIX,                                                                      \
        .free_bytes = host_free_bytes,                                                                               \
        .packed_floats = packed_floats##SUFFIX,                                                                      \
        .pack_prefix = pack_prefix##SUFFIX,                                                                          \
        .gather = cpu_gather,                                                                                        \
        .rms_norm = cpu_rms_norm,                                                                                    \
        .matmul = cpu_matmul,                                                                                        \
        .project = cpu_project,                                                                                      \
        .swiglu = cpu_swiglu,                                                                                        \
        .rope = cpu_rope,                                                                                            \
        .store_prefix = cpu_store_prefix,                                                                            \
        .store_tail = cpu_store_tail,                                                                                \
        .attend_prefix = attend_prefix##SUFFIX,                                                                      \
        .attend_rows = attend_rows##SUFFIX,                                                                          \
        .value_weights = cpu_value_weights,                                                                          \
        .sample = host_sample,                                                                                       \
        .column_sums = cpu_column_sums,                                                                              \
        .output_norms = cpu_output_norms,                                                                            \
        .norms = host_norms,                                                                                         \
        .moments = host_moments,                                                                                     \
        .quadratic = host_quadratic,                                                                                 \
        .spreads = host_spreads,                                                                                     \
    }

CPU_BACKEND(, PRECISION_F32, "f32", "oneDNN and OpenMP, float32");
CPU_BACKEND(_bf16x3, PRECISION_BF16X3, "bf16x3", "as cpu, products of operands in two bfloat16 parts");
CPU_BACKEND(_bf16, PRECISION_BF16, "bf16", "as cpu, products of operands rounded to bfloat16");
