#include "profiler/backend/packed_primitives.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { N_ARGUMENTS = 4 };

struct primitive {
    primitive_key key;
    dnnl_primitive_t handle;
    dnnl_memory_t *
        memories; // [threads, N_ARGUMENTS] of products: making them for each call would cost as much as a small product
    int threads;
    dnnl_memory_desc_t a, b, c, scratchpad; // a reorder goes from a to b
    struct primitive *next;
};

static struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    bool started, native;
    primitive *primitives[PRIMITIVE_BUCKETS];
} library;

uint32_t primitive_bucket(const primitive_key *key)
{
    uint64_t h = key->m * 0x9E3779B97F4A7C15u ^ key->n * 0xC2B2AE3D27D4EB4Fu ^ key->k * 0x165667B19E3779F9u ^
                 key->ld * 0x27D4EB2F165667C5u ^ (key->accumulate * 2u + key->transposed + key->type * 4u);
    return (uint32_t)(h >> 32 ^ h) % PRIMITIVE_BUCKETS;
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

// oneDNN works on this thread alone until the caller gives omp_set_num_threads() what this returns. Inside a parallel
// region it does so anyway, but for regions of one thread (OMP_NUM_THREADS=1,2): these count as none, and numbers would
// depend on how many threads a nested region may have.
static int one_thread(void)
{
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    return threads;
}

// The description of a product's primitive, made as if the machine had one thread. b may be given as `any`.
static dnnl_primitive_desc_t plan_product(primitive *p)
{
    dnnl_matmul_desc_t plan;
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_post_ops_t sum = NULL;
    dnnl_primitive_desc_t d = NULL;
    bool ok = dnnl_primitive_attr_create(&attributes) == dnnl_success &&
              dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user) == dnnl_success &&
              dnnl_post_ops_create(&sum) == dnnl_success;
    if (ok && p->key.accumulate)
        ok = dnnl_post_ops_append_sum(sum, 1.0f) == dnnl_success &&
             dnnl_primitive_attr_set_post_ops(attributes, sum) == dnnl_success;
    ok = ok && dnnl_matmul_desc_init(&plan, &p->a, &p->b, NULL, &p->c) == dnnl_success;
    int threads = one_thread();
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

bool primitive_bf16_is_native(void)
{
    return start_library() && library.native;
}

// It stands in the table as a primitive that does nothing.
const primitive *primitive_find_layout(dnnl_data_type_t type, uint32_t k, uint32_t n)
{
    primitive_key key = {.type = type, .n = n, .k = k};
    return primitive_find(&key);
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
    int threads = one_thread();
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
    const primitive *layout = primitive_find_layout(type, key->k, key->n);
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

const primitive *primitive_find(const primitive_key *key)
{
    primitive **at = &library.primitives[primitive_bucket(key)];
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

size_t primitive_b_bytes(const primitive *p)
{
    return dnnl_memory_desc_get_size(&p->b);
}

size_t primitive_scratch_bytes(const primitive *p)
{
    return dnnl_memory_desc_get_size(&p->scratchpad);
}

bool primitives_serve(int threads)
{
    bool ok = true;
    for (int i = 0; i < PRIMITIVE_BUCKETS; i++)
        for (primitive *p = library.primitives[i]; p; p = p->next) ok = ok && grow_memories(p, threads);
    return ok;
}

// --- scratch memory of the threads, for what a kernel keeps beside its operands ---

static struct {
    char *block;
    int threads;
    size_t each; // bytes, a multiple of 64
} scratchpads;

bool primitives_take_scratch(size_t bytes, int threads)
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

bool primitive_run(const primitive *p, const void *a, const void *b, float *c)
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
    int threads = one_thread();
    ok = ok && dnnl_primitive_execute(p->handle, library.stream, n, given) == dnnl_success;
    omp_set_num_threads(threads);
    for (int i = 0; i < n; i++) dnnl_memory_destroy(own[i]);
    return ok;
}
