#include "profiler/packed.h"
#include "profiler/linalg.h"
#include "profiler/packed_steps.h"
#include "profiler/packed_tiles.h"
#include <dnnl.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

// With few inner terms a product is bound by writing its result, and more of them cost little: there the operands keep
// three parts (24 bits) in one product with six times the terms, a = [h m l h m h], b = [h; h; h; m; m; l]. The scores
// of attention are of this kind, and what is off in them counts most, being in an exponent. With many terms the
// products run one after the other, b's high part kept once.
enum { JOINED_MAX_K = 128, JOINED = 6 };

static bool is_joined(precision p, uint32_t k)
{
    return p == PRECISION_BF16X3 && k <= JOINED_MAX_K;
}

// The same choice where the tile unit multiplies: the parts that it takes of each operand.
unsigned packed_parts(precision p, uint32_t k)
{
    return p == PRECISION_F32 || is_joined(p, k) ? 3 : p == PRECISION_BF16X3 ? 2 : 1;
}

const char *precision_name(precision p)
{
    static const char *const names[] = {"f32", "bf16x3", "bf16"};
    return names[p];
}

// --- oneDNN's objects. Everything here is made on one thread, outside of parallel regions, and lives as long as the
// process. ---

// What a primitive is for; a reorder has m = 0. Compared as bytes: no padding between members.
typedef struct primitive_key {
    uint32_t type, m, n, k; // type: dnnl_data_type_t
    uint64_t ld;            // of a reorder's source, n for a product; 0 for a layout alone
    uint32_t accumulate, transposed;
} primitive_key;

enum { N_ARGUMENTS = 4 };

typedef struct primitive {
    primitive_key key;
    dnnl_primitive_t handle;
    dnnl_memory_t *
        memories; // [threads, N_ARGUMENTS] of products: making them for each call would cost as much as a small product
    int threads;
    dnnl_memory_desc_t a, b, c, scratchpad; // a reorder goes from a to b
    struct primitive *next;
} primitive;

struct product {
    precision p;
    const primitive *first, *more; // `more` adds to c what the first began
    uint32_t m, n, k;
    size_t b_part;
    bool accumulate;
    unsigned tile_parts; // not 0: the tile unit's, no primitives
    struct product *next;
};

enum { BUCKETS = 1024 };
static struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    bool started, native;
    primitive *primitives[BUCKETS];
    product *products[BUCKETS];
} library;

static uint32_t bucket_of(const primitive_key *key)
{
    uint64_t h = key->m * 0x9E3779B97F4A7C15u ^ key->n * 0xC2B2AE3D27D4EB4Fu ^ key->k * 0x165667B19E3779F9u ^
                 key->ld * 0x27D4EB2F165667C5u ^ (key->accumulate * 2u + key->transposed + key->type * 4u);
    return (uint32_t)(h >> 32 ^ h) % BUCKETS;
}

static bool describe(dnnl_memory_desc_t *d, uint32_t rows, uint32_t columns, dnnl_data_type_t type, size_t row_step,
                     size_t column_step)
{
    dnnl_dims_t dims = {rows, columns}, strides = {(dnnl_dim_t)row_step, (dnnl_dim_t)column_step};
    return dnnl_memory_desc_init_by_strides(d, 2, dims, type, strides) == dnnl_success;
}

static bool describe_any(dnnl_memory_desc_t *d, uint32_t rows, uint32_t columns, dnnl_data_type_t type)
{
    dnnl_dims_t dims = {rows, columns};
    return dnnl_memory_desc_init_by_tag(d, 2, dims, type, dnnl_format_tag_any) == dnnl_success;
}

// The description of a product's primitive, made as if the machine had one thread. b may be given as `any`.
static dnnl_primitive_desc_t plan_product(primitive *p)
{
    dnnl_matmul_desc_t plan;
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_post_ops_t sum = NULL;
    dnnl_primitive_desc_t d = NULL;
    int threads = omp_get_max_threads();
    bool ok = dnnl_primitive_attr_create(&attributes) == dnnl_success &&
              dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user) == dnnl_success &&
              dnnl_post_ops_create(&sum) == dnnl_success;
    if (ok && p->key.accumulate)
        ok = dnnl_post_ops_append_sum(sum, 1.0f) == dnnl_success &&
             dnnl_primitive_attr_set_post_ops(attributes, sum) == dnnl_success;
    ok = ok && dnnl_matmul_desc_init(&plan, &p->a, &p->b, NULL, &p->c) == dnnl_success;
    omp_set_num_threads(1);
    if (ok && dnnl_primitive_desc_create(&d, &plan, attributes, library.engine, NULL) != dnnl_success) d = NULL;
    omp_set_num_threads(threads);
    dnnl_post_ops_destroy(sum);
    dnnl_primitive_attr_destroy(attributes);
    return d;
}

static bool start_library(void)
{
    if (library.started) return library.stream != NULL;
    library.started = true;
    if (dnnl_engine_create(&library.engine, dnnl_cpu, 0) != dnnl_success ||
        dnnl_stream_create(&library.stream, library.engine, dnnl_stream_default_flags) != dnnl_success)
        return false;
    primitive probe = {.key = {.type = dnnl_bf16}};
    const char *name = "";
    dnnl_primitive_desc_t d = NULL;
    if (describe(&probe.a, 32, 64, dnnl_bf16, 64, 1) && describe_any(&probe.b, 64, 64, dnnl_bf16) &&
        describe(&probe.c, 32, 64, dnnl_f32, 64, 1) && (d = plan_product(&probe)))
        dnnl_primitive_desc_query(d, dnnl_query_impl_info_str, 0, (void *)&name);
    library.native = d && strncmp(name, "ref", 3) != 0 && strncmp(name, "gemm", 4) != 0;
    if (d) dnnl_primitive_desc_destroy(d);
    return true;
}

bool packed_is_native(void)
{
    return start_library() && library.native;
}

static dnnl_data_type_t type_of(precision p)
{
    return p != PRECISION_F32 && packed_is_native() ? dnnl_bf16 : dnnl_f32;
}

bool operand_is_plain(precision p)
{
    return p == PRECISION_F32 && !tiles_available();
}

static size_t type_size(dnnl_data_type_t type)
{
    return type == dnnl_bf16 ? 2 : sizeof(float);
}

static const primitive *find_primitive(const primitive_key *key);

// The layout of b [k,n]: one for all m, so that any number of rows can meet it. It stands in the table as a primitive
// that does nothing.
static const primitive *find_layout(dnnl_data_type_t type, uint32_t k, uint32_t n)
{
    primitive_key key = {.type = type, .n = n, .k = k};
    return find_primitive(&key);
}

static bool choose_layout(primitive *p)
{
    enum { ROWS = 64 };
    const primitive_key *key = &p->key;
    dnnl_data_type_t type = (dnnl_data_type_t)key->type;
    primitive probe = {.key = {.type = type}};
    if (!start_library() || !describe(&probe.a, ROWS, key->k, type, key->k, 1) ||
        !describe_any(&probe.b, key->k, key->n, type) || !describe(&probe.c, ROWS, key->n, dnnl_f32, key->n, 1))
        return false;
    dnnl_primitive_desc_t d = plan_product(&probe);
    if (!d) return false;
    p->b = *dnnl_primitive_desc_query_md(d, dnnl_query_weights_md, 0);
    dnnl_primitive_desc_destroy(d);
    return true;
}

static dnnl_primitive_desc_t plan_reorder(primitive *p)
{
    const primitive_key *key = &p->key;
    dnnl_primitive_desc_t d = NULL;
    size_t row_step = key->transposed ? 1 : key->ld, column_step = key->transposed ? key->ld : 1;
    if (!describe(&p->a, key->k, key->n, dnnl_f32, row_step, column_step)) return NULL;
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    if (dnnl_reorder_primitive_desc_create(&d, &p->a, library.engine, &p->b, library.engine, NULL) != dnnl_success)
        d = NULL;
    omp_set_num_threads(threads);
    return d;
}

static const dnnl_memory_desc_t *argument_of(const primitive *p, int i)
{
    const dnnl_memory_desc_t *const all[N_ARGUMENTS] = {&p->a, &p->b, &p->c, &p->scratchpad};
    return all[i];
}

static bool is_padded(const dnnl_memory_desc_t *d)
{
    for (int i = 0; i < d->ndims; i++)
        if (d->dims[i] != d->padded_dims[i]) return true;
    return false;
}

// One set of memory objects per thread. Padded operands have none: oneDNN writes their padding whenever they are
// pointed elsewhere, which threads that share a packed matrix must not do.
static bool grow_memories(primitive *p, int threads)
{
    if (p->key.m == 0 || p->threads >= threads) return true;
    dnnl_memory_t *all = realloc(p->memories, (size_t)threads * N_ARGUMENTS * sizeof(dnnl_memory_t));
    if (!all) return false;
    p->memories = all;
    for (; p->threads < threads; p->threads++)
        for (int i = 0; i < N_ARGUMENTS; i++) {
            dnnl_memory_t *at = &all[p->threads * N_ARGUMENTS + i];
            *at = NULL;
            if (!is_padded(argument_of(p, i)) &&
                dnnl_memory_create(at, argument_of(p, i), library.engine, DNNL_MEMORY_NONE) != dnnl_success)
                return false;
        }
    return true;
}

static bool make_primitive(primitive *p)
{
    const primitive_key *key = &p->key;
    dnnl_data_type_t type = (dnnl_data_type_t)key->type;
    dnnl_primitive_desc_t d = NULL;
    if (key->ld == 0) return choose_layout(p);
    const primitive *layout = find_layout(type, key->k, key->n);
    if (!layout) return false;
    p->b = layout->b;
    if (key->m == 0) d = plan_reorder(p);
    else if (describe(&p->a, key->m, key->k, type, key->k, 1) && describe(&p->c, key->m, key->n, dnnl_f32, key->ld, 1))
        d = plan_product(p);
    if (!d) return false;
    p->scratchpad = *dnnl_primitive_desc_query_md(d, dnnl_query_scratchpad_md, 0);
    bool ok = dnnl_primitive_create(&p->handle, d) == dnnl_success;
    dnnl_primitive_desc_destroy(d);
    return ok && grow_memories(p, omp_get_max_threads());
}

static const primitive *find_primitive(const primitive_key *key)
{
    primitive **at = &library.primitives[bucket_of(key)];
    for (; *at; at = &(*at)->next)
        if (memcmp(&(*at)->key, key, sizeof *key) == 0) return *at;
    primitive *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->key = *key;
    if (!make_primitive(p)) {
        free(p);
        return NULL;
    }
    *at = p;
    return p;
}

// --- scratch memory of the threads, for what a kernel keeps beside its operands ---

static struct {
    char *block;
    int threads;
    size_t each; // bytes, a multiple of 64
} scratchpads;

static bool grow_scratchpads(size_t bytes, int threads)
{
    size_t each = (bytes / 64 + 1) * 64;
    if (scratchpads.threads >= threads && scratchpads.each >= each) return true;
    threads = threads > scratchpads.threads ? threads : scratchpads.threads;
    each = each > scratchpads.each ? each : scratchpads.each;
    char *block = aligned_alloc(64, (size_t)threads * each);
    if (!block) return false;
    free(scratchpads.block);
    scratchpads.block = block;
    scratchpads.threads = threads;
    scratchpads.each = each;
    return true;
}

// Runs a primitive on the caller's thread.
static bool run_primitive(const primitive *p, const void *a, const void *b, float *c)
{
    bool is_reorder = p->key.m == 0;
    int thread = omp_get_thread_num(), n = is_reorder ? 2 : N_ARGUMENTS;
    const int names[N_ARGUMENTS] = {is_reorder ? DNNL_ARG_FROM : DNNL_ARG_SRC,
                                    is_reorder ? DNNL_ARG_TO : DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD};
    union { // oneDNN's handles take no const
        const void *in;
        void *out;
    } places[N_ARGUMENTS] = {{a}, {b}, {c}, {scratchpads.block + (size_t)thread * scratchpads.each}};
    dnnl_exec_arg_t given[N_ARGUMENTS];
    dnnl_memory_t own[N_ARGUMENTS] = {NULL}; // made for this call
    bool ok = is_reorder || thread < p->threads;
    for (int i = 0; ok && i < n; i++) {
        dnnl_memory_t kept = is_reorder ? NULL : p->memories[thread * N_ARGUMENTS + i];
        ok = kept ? dnnl_memory_set_data_handle(kept, places[i].out) == dnnl_success
                  : dnnl_memory_create(&own[i], argument_of(p, i), library.engine, places[i].out) == dnnl_success;
        given[i] = (dnnl_exec_arg_t){names[i], kept ? kept : own[i]};
    }
    ok = ok && dnnl_primitive_execute(p->handle, library.stream, n, given) == dnnl_success;
    for (int i = 0; i < n; i++) dnnl_memory_destroy(own[i]);
    return ok;
}

// --- packing ---

static size_t round_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

// Bytes of one part.
static size_t part_bytes(precision p, uint32_t k, uint32_t n)
{
    const primitive *layout = find_layout(type_of(p), is_joined(p, k) ? JOINED * k : k, n);
    return layout ? round_up(dnnl_memory_desc_get_size(&layout->b)) : 0;
}

size_t packed_bytes(precision p, uint32_t k, uint32_t n)
{
    if (tiles_available()) return tiles_b_bytes(packed_parts(p, k), k, n);
    size_t one = part_bytes(p, k, n);
    return p == PRECISION_BF16X3 && !is_joined(p, k) ? 2 * one : one;
}

size_t operand_bytes(precision p, uint32_t m, uint32_t k)
{
    if (tiles_available()) return tiles_a_bytes(packed_parts(p, k), m, k);
    size_t parts = p != PRECISION_BF16X3 ? 1 : is_joined(p, k) ? JOINED : 2;
    return round_up(parts * m * k * type_size(type_of(p)));
}

// The nearest bfloat16, ties to even, as the float32 with the same value. Numbers that overflow become infinite, NaN
// stays NaN.
static inline float round_bf16(float x)
{
    union {
        float f;
        uint32_t u;
    } v = {x};
    uint32_t rounded = (v.u + 0x7fffu + (v.u >> 16 & 1u)) & 0xffff0000u;
    v.u = x == x ? rounded : v.u | 0x00400000u;
    return v.f;
}

static inline uint16_t bf16_bits(float rounded)
{
    union {
        float f;
        uint32_t u;
    } v = {rounded};
    return (uint16_t)(v.u >> 16);
}

SIMD_CLONES static void high_and_low(float *high, float *low, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale, top = round_bf16(value);
        high[i] = top;
        low[i] = round_bf16(value - top);
    }
}

SIMD_CLONES static void three_parts(float *high, float *middle, float *low, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale, top = round_bf16(value), rest = value - top, next = round_bf16(rest);
        high[i] = top;
        middle[i] = next;
        low[i] = round_bf16(rest - next);
    }
}

SIMD_CLONES static void three_parts_bits(uint16_t *high, uint16_t *middle, uint16_t *low, const float *x, size_t n,
                                         float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale, top = round_bf16(value), rest = value - top, next = round_bf16(rest);
        high[i] = bf16_bits(top);
        middle[i] = bf16_bits(next);
        low[i] = bf16_bits(round_bf16(rest - next));
    }
}

// Compilers do not vectorise to the instructions for this, so they are named. They treat subnormals as zero; all else
// is as above.
#if defined(__x86_64__) && defined(__GNUC__)
#define BF16_UNIT __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

static bool has_bf16_unit(void)
{
    return __builtin_cpu_supports("avx512bf16");
}

BF16_UNIT static size_t high_bits_by_unit(uint16_t *high, const float *x, size_t n, float scale)
{
    size_t i = 0;
    for (__m512 s = _mm512_set1_ps(scale); i + 32 <= n; i += 32) {
        __m512 a = _mm512_mul_ps(_mm512_loadu_ps(x + i), s), b = _mm512_mul_ps(_mm512_loadu_ps(x + i + 16), s);
        _mm512_storeu_si512(high + i, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    return i;
}

BF16_UNIT static size_t high_and_low_bits_by_unit(uint16_t *high, uint16_t *low, const float *x, size_t n, float scale)
{
    size_t i = 0;
    for (__m512 s = _mm512_set1_ps(scale); i + 16 <= n; i += 16) {
        __m512 a = _mm512_mul_ps(_mm512_loadu_ps(x + i), s);
        __m256i top = (__m256i)_mm512_cvtneps_pbh(a);
        __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(top), 16));
        _mm256_storeu_si256((void *)(high + i), top);
        _mm256_storeu_si256((void *)(low + i), (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(a, back)));
    }
    return i;
}
#else
#define has_bf16_unit() false
#define high_bits_by_unit(high, x, n, scale) ((size_t)0)
#define high_and_low_bits_by_unit(high, low, x, n, scale) ((size_t)0)
#endif

SIMD_CLONES static void high_bits(uint16_t *high, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) high[i] = bf16_bits(round_bf16(x[i] * scale));
}

SIMD_CLONES static void high_and_low_bits(uint16_t *high, uint16_t *low, const float *x, size_t n, float scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float value = x[i] * scale, top = round_bf16(value);
        high[i] = bf16_bits(top);
        low[i] = bf16_bits(round_bf16(value - top));
    }
}

size_t packed_temp_floats(uint32_t k, uint32_t n)
{
    return (size_t)(k <= JOINED_MAX_K ? JOINED : 2) * k * n;
}

// Bytes that were written to, 0 for a failure. Packing may happen inside a parallel region; making a primitive there is
// as good, since it is for one thread anyway.
static size_t reorder(precision p, void *to, const float *from, size_t ld, bool transposed, uint32_t k, uint32_t n)
{
    primitive_key key = {.type = type_of(p), .n = n, .k = k, .ld = ld, .transposed = transposed};
    const primitive *r;
#pragma omp critical(packed_primitives)
    r = find_primitive(&key);
    return r && run_primitive(r, from, to, NULL) ? round_up(dnnl_memory_desc_get_size(&r->b)) : 0;
}

// The three parts of a joined b, lines of it apart by `line` floats and its parts by `part`.
static void store_joined(float *temp, size_t line, size_t part, const float *b, size_t ld, size_t lines, size_t length)
{
    for (size_t i = 0; i < lines; i++) {
        float *at = temp + i * line;
        three_parts(at, at + 3 * part, at + 5 * part, b + i * ld, length, 1.0f);
        memcpy(at + part, at, length * sizeof *at);
        memcpy(at + 2 * part, at, length * sizeof *at);
        memcpy(at + 4 * part, at + 3 * part, length * sizeof *at);
    }
}

bool packed_store(precision p, void *to, const float *b, size_t ld, bool transposed, uint32_t k, uint32_t n,
                  float *temp)
{
    if (tiles_available()) {
        tiles_pack_b(packed_parts(p, k), to, b, ld, transposed, k, n);
        return true;
    }
    if (p == PRECISION_F32 || (p == PRECISION_BF16 && packed_is_native())) // the reorder rounds by itself
        return reorder(p, to, b, ld, transposed, k, n);
    size_t lines = transposed ? n : k, length = transposed ? k : n, part = (size_t)k * n;
    if (is_joined(p, k)) {
        store_joined(temp, transposed ? JOINED * length : length, transposed ? length : part, b, ld, lines, length);
        return reorder(p, to, temp, transposed ? JOINED * length : length, transposed, JOINED * k, n);
    }
    for (size_t i = 0; i < lines; i++)
        high_and_low(temp + i * length, temp + part + i * length, b + i * ld, length, 1.0f);
    size_t first = reorder(p, to, temp, length, transposed, k, n);
    return first && (p == PRECISION_BF16 || reorder(p, (char *)to + first, temp + part, length, transposed, k, n));
}

static void split_joined(void *to, bool bits, const float *x, uint32_t k, float scale)
{
    uint16_t *b = to;
    float *f = to;
    if (bits) {
        three_parts_bits(b, b + k, b + 2 * k, x, k, scale);
        memcpy(b + 3 * k, b, 2 * k * sizeof *b);
        memcpy(b + 5 * k, b, k * sizeof *b);
    } else {
        three_parts(f, f + k, f + 2 * k, x, k, scale);
        memcpy(f + 3 * k, f, 2 * k * sizeof *f);
        memcpy(f + 5 * k, f, k * sizeof *f);
    }
}

void operand_split(precision p, void *to, const float *x, size_t ld, uint32_t m, uint32_t first, uint32_t rows,
                   uint32_t k, float scale)
{
    if (tiles_available()) {
        for (uint32_t i = 0; i < rows; i++, x += ld) tiles_pack_row(packed_parts(p, k), to, x, first + i, k, scale);
        return;
    }
    bool joined = is_joined(p, k), bits = type_of(p) == dnnl_bf16, unit = has_bf16_unit();
    size_t step = joined ? JOINED * (size_t)k : k, to_low = (size_t)m * k;
    for (uint32_t i = first; i < first + rows; i++, x += ld) {
        uint16_t *b = (uint16_t *)to + i * step;
        float *f = (float *)to + i * step;
        size_t done = 0;
        if (p == PRECISION_F32) {
            for (uint32_t c = 0; c < k; c++) f[c] = x[c] * scale;
        } else if (joined) {
            split_joined(bits ? (void *)b : (void *)f, bits, x, k, scale);
        } else if (p == PRECISION_BF16 && bits) {
            if (unit) done = high_bits_by_unit(b, x, k, scale);
            high_bits(b + done, x + done, k - done, scale);
        } else if (p == PRECISION_BF16) {
            for (uint32_t c = 0; c < k; c++) f[c] = round_bf16(x[c] * scale);
        } else if (bits) {
            if (unit) done = high_and_low_bits_by_unit(b, b + to_low, x, k, scale);
            high_and_low_bits(b + done, b + to_low + done, x + done, k - done, scale);
        } else {
            high_and_low(f, f + to_low, x, k, scale);
        }
    }
}

// --- products ---

static bool make_product(product *made)
{
    if (tiles_available()) {
        made->tile_parts = packed_parts(made->p, made->k);
        return true;
    }
    bool joined = is_joined(made->p, made->k);
    primitive_key key = {.type = type_of(made->p),
                         .m = made->m,
                         .n = made->n,
                         .k = joined ? JOINED * made->k : made->k,
                         .ld = made->n,
                         .accumulate = made->accumulate};
    made->first = find_primitive(&key);
    made->more = made->first;
    if (made->p == PRECISION_BF16X3 && !joined) {
        key.accumulate = true;
        made->more = find_primitive(&key);
        made->b_part = part_bytes(made->p, made->k, made->n);
    }
    return made->first && made->more &&
           grow_scratchpads(dnnl_memory_desc_get_size(&made->first->scratchpad), omp_get_max_threads()) &&
           grow_scratchpads(dnnl_memory_desc_get_size(&made->more->scratchpad), omp_get_max_threads());
}

uint32_t product_rows(void)
{
    return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core ? PRODUCT_ROWS_MAX
                                                                                                 : 30;
}

bool product_prepare(int threads)
{
    static int prepared; // threads
    if (threads <= prepared) return true;
    bool ok = grow_scratchpads(0, threads);
    for (int i = 0; i < BUCKETS; i++)
        for (primitive *p = library.primitives[i]; p; p = p->next) ok = ok && grow_memories(p, threads);
    if (ok) prepared = threads;
    return ok;
}

const product *product_find(precision p, uint32_t m, uint32_t n, uint32_t k, bool accumulate)
{
    primitive_key key = {.type = (uint32_t)p, .m = m, .n = n, .k = k, .accumulate = accumulate};
    product **at = &library.products[bucket_of(&key)];
    for (; *at; at = &(*at)->next) {
        const product *found = *at;
        if (found->p == p && found->m == m && found->n == n && found->k == k && found->accumulate == accumulate)
            return product_prepare(omp_get_max_threads()) ? found : NULL;
    }
    product *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    *made = (product){.p = p, .m = m, .n = n, .k = k, .accumulate = accumulate};
    if (!make_product(made)) {
        free(made);
        return NULL;
    }
    *at = made;
    return made;
}

bool product_run(const product *p, const void *a, const void *b, float *c)
{
    if (p->tile_parts) {
        product_run_rows(p, p->m, a, b, c, p->n, false);
        return true;
    }
    bool ok = run_primitive(p->first, a, b, c);
    if (p->b_part) {
        const char *low_a = (const char *)a + (size_t)p->m * p->k * type_size(type_of(p->p));
        ok = ok && run_primitive(p->more, low_a, b, c) && run_primitive(p->more, a, (const char *)b + p->b_part, c);
    }
    return ok;
}

size_t packed_high_bytes(precision p, uint32_t k, uint32_t n)
{
    return tiles_available() || p != PRECISION_BF16X3 || is_joined(p, k) ? 0 : part_bytes(p, k, n);
}

bool product_run_high(const product *p, const void *a, const void *b, float *c)
{
    const char *low_a = (const char *)a + (size_t)p->m * p->k * type_size(type_of(p->p));
    return run_primitive(p->first, a, b, c) && run_primitive(p->more, low_a, b, c);
}

bool product_takes_any_rows(void)
{
    return tiles_available();
}

void product_run_rows(const product *p, uint32_t rows, const void *a, const void *b, float *c, size_t ldc, bool add)
{
    product_run_steps(p, rows, a, b, 0, p->tile_parts, c, ldc, add);
}

size_t packed_step_bytes(unsigned bits, uint32_t k, uint32_t n)
{
    return (size_t)((n + STEP_COLUMNS - 1) / STEP_COLUMNS) * (k / STEP_TERMS) * steps_block_bytes(bits);
}

void product_run_steps(const product *p, uint32_t rows, const void *a, const void *b, unsigned bits, unsigned parts,
                       float *c, size_t ldc, bool add)
{
    tiles_multiply(&(tile_product){.parts = p->tile_parts,
                                   .m = rows,
                                   .n = p->n,
                                   .k = p->k,
                                   .accumulate = p->accumulate,
                                   .add = add,
                                   .a = a,
                                   .b = b,
                                   .c = c,
                                   .ldc = ldc,
                                   .bits = bits,
                                   .b_parts = parts < p->tile_parts ? parts : p->tile_parts});
}
