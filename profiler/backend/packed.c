#include "profiler/backend/packed.h"
#include "formats/need.h"
#include "profiler/backend/bf16_round.h"
#include "profiler/backend/packed_steps.h"
#include "profiler/backend/packed_tiles.h"
#include <dnnl.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

// ---- oneDNN's objects: primitives (products, and reorders that pack) by shape, made once and kept as long as the
// process lives, and the scratch memory of the threads that run them. Every primitive is made as if the machine had one
// thread and runs on its caller's alone ----

// What a primitive is for; a reorder has m = 0. Compared as bytes: no padding between members.
typedef struct primitive_key {
    uint32_t type, m, n, k; // type: dnnl_data_type_t
    uint64_t ld;            // of a reorder's source, n for a product; 0 for a layout alone
    uint32_t accumulate, transposed;
} primitive_key;

enum { N_ARGUMENTS = 4, PRIMITIVE_BUCKETS = 1024 }; // lists of a table of primitives

typedef struct primitive {
    primitive_key key;
    dnnl_primitive_t handle;
    dnnl_memory_t *
        memories; // [threads, N_ARGUMENTS] of products: making them for each call would cost as much as a small product
    int threads;
    dnnl_memory_desc_t a, b, c, scratchpad; // a reorder goes from a to b
    struct primitive *next;
} primitive;

static struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    bool native;
    primitive *primitives[PRIMITIVE_BUCKETS];
} library;

static uint32_t primitive_bucket(const primitive_key *key)
{
    uint64_t h = key->m * 0x9E3779B97F4A7C15u ^ key->n * 0xC2B2AE3D27D4EB4Fu ^ key->k * 0x165667B19E3779F9u ^
                 key->ld * 0x27D4EB2F165667C5u ^ (key->accumulate * 2u + key->transposed + key->type * 4u);
    return (uint32_t)(h >> 32 ^ h) % PRIMITIVE_BUCKETS;
}

// oneDNN is only asked for what it supports, so it fails only if memory runs out, which ends the program.
static void must(dnnl_status_t status)
{
    needed(status == dnnl_success ? &library : NULL, "matrix products");
}

static void describe(dnnl_memory_desc_t *d, uint32_t rows, uint32_t columns, dnnl_data_type_t type, size_t row_step,
                     size_t column_step)
{
    dnnl_dims_t dims = {rows, columns}, strides = {(dnnl_dim_t)row_step, (dnnl_dim_t)column_step};
    must(dnnl_memory_desc_init_by_strides(d, 2, dims, type, strides));
}

static void describe_any(dnnl_memory_desc_t *d, uint32_t rows, uint32_t columns, dnnl_data_type_t type)
{
    dnnl_dims_t dims = {rows, columns};
    must(dnnl_memory_desc_init_by_tag(d, 2, dims, type, dnnl_format_tag_any));
}

// Makes oneDNN work on this thread alone until the caller passes what this returns to omp_set_num_threads(). Inside a
// parallel region it does so anyway, except in one of one thread (OMP_NUM_THREADS=1,2): that counts as none, and
// results would depend on how many threads a nested region may have.
static int one_thread(void)
{
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    return threads;
}

// Returns the description of a product's primitive, made as if the machine had one thread; NULL if oneDNN has none for
// these types. The layout of b may be `any`.
static dnnl_primitive_desc_t plan_product(primitive *p)
{
    dnnl_matmul_desc_t plan;
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_post_ops_t sum = NULL;
    dnnl_primitive_desc_t d = NULL;
    must(dnnl_primitive_attr_create(&attributes));
    must(dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user));
    must(dnnl_post_ops_create(&sum));
    if (p->key.accumulate) must(dnnl_post_ops_append_sum(sum, 1.0f));
    if (p->key.accumulate) must(dnnl_primitive_attr_set_post_ops(attributes, sum));
    must(dnnl_matmul_desc_init(&plan, &p->a, &p->b, NULL, &p->c));
    int threads = one_thread();
    if (dnnl_primitive_desc_create(&d, &plan, attributes, library.engine, NULL) != dnnl_success) d = NULL;
    omp_set_num_threads(threads);
    dnnl_post_ops_destroy(sum);
    dnnl_primitive_attr_destroy(attributes);
    return d;
}

static void start_library(void)
{
    if (library.engine) return;
    must(dnnl_engine_create(&library.engine, dnnl_cpu, 0));
    must(dnnl_stream_create(&library.stream, library.engine, dnnl_stream_default_flags));
    primitive probe = {.key = {.type = dnnl_bf16}};
    const char *name = "";
    describe(&probe.a, 32, 64, dnnl_bf16, 64, 1);
    describe_any(&probe.b, 64, 64, dnnl_bf16);
    describe(&probe.c, 32, 64, dnnl_f32, 64, 1);
    dnnl_primitive_desc_t d = plan_product(&probe);
    if (d) dnnl_primitive_desc_query(d, dnnl_query_impl_info_str, 0, (void *)&name);
    library.native = d && strncmp(name, "ref", 3) != 0 && strncmp(name, "gemm", 4) != 0;
    if (d) dnnl_primitive_desc_destroy(d);
}

bool packed_is_native(void)
{
    start_library();
    return library.native;
}

static const primitive *primitive_find(const primitive_key *key);

// Finds the layout of b [k,n], the same for all m, so that any number of rows can be multiplied with it. The table
// holds it as a primitive that does nothing.
static const primitive *primitive_find_layout(dnnl_data_type_t type, uint32_t k, uint32_t n)
{
    primitive_key key = {.type = type, .n = n, .k = k};
    return primitive_find(&key);
}

static void choose_layout(primitive *p)
{
    enum { ROWS = 64 };
    const primitive_key *key = &p->key;
    dnnl_data_type_t type = (dnnl_data_type_t)key->type;
    primitive probe = {.key = {.type = type}};
    start_library();
    describe(&probe.a, ROWS, key->k, type, key->k, 1);
    describe_any(&probe.b, key->k, key->n, type);
    describe(&probe.c, ROWS, key->n, dnnl_f32, key->n, 1);
    dnnl_primitive_desc_t d = needed(plan_product(&probe), "matrix products");
    p->b = *dnnl_primitive_desc_query_md(d, dnnl_query_weights_md, 0);
    dnnl_primitive_desc_destroy(d);
}

static dnnl_primitive_desc_t plan_reorder(primitive *p)
{
    const primitive_key *key = &p->key;
    dnnl_primitive_desc_t d = NULL;
    size_t row_step = key->transposed ? 1 : key->ld, column_step = key->transposed ? key->ld : 1;
    describe(&p->a, key->k, key->n, dnnl_f32, row_step, column_step);
    int threads = one_thread();
    must(dnnl_reorder_primitive_desc_create(&d, &p->a, library.engine, &p->b, library.engine, NULL));
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

// Makes one set of memory objects per thread. Padded operands have none: oneDNN writes their padding whenever they are
// pointed elsewhere, which threads that share a packed matrix must not do.
static void grow_memories(primitive *p, int threads)
{
    if (p->key.m == 0 || p->threads >= threads) return;
    dnnl_memory_t *all = p->memories =
        need_more(p->memories, (size_t)threads * N_ARGUMENTS, sizeof *all, "operands of products");
    for (; p->threads < threads; p->threads++)
        for (int i = 0; i < N_ARGUMENTS; i++) {
            dnnl_memory_t *at = &all[p->threads * N_ARGUMENTS + i];
            *at = NULL;
            if (!is_padded(argument_of(p, i)))
                must(dnnl_memory_create(at, argument_of(p, i), library.engine, DNNL_MEMORY_NONE));
        }
}

static void make_primitive(primitive *p)
{
    const primitive_key *key = &p->key;
    dnnl_data_type_t type = (dnnl_data_type_t)key->type;
    if (key->ld == 0) {
        choose_layout(p);
        return;
    }
    p->b = primitive_find_layout(type, key->k, key->n)->b;
    if (key->m > 0) {
        describe(&p->a, key->m, key->k, type, key->k, 1);
        describe(&p->c, key->m, key->n, dnnl_f32, key->ld, 1);
    }
    dnnl_primitive_desc_t d = needed(key->m > 0 ? plan_product(p) : plan_reorder(p), "matrix products");
    p->scratchpad = *dnnl_primitive_desc_query_md(d, dnnl_query_scratchpad_md, 0);
    must(dnnl_primitive_create(&p->handle, d));
    dnnl_primitive_desc_destroy(d);
    grow_memories(p, omp_get_max_threads());
}

// Finds a primitive, or makes it for the current number of threads. Runs on one thread at a time.
static const primitive *primitive_find(const primitive_key *key)
{
    primitive **at = &library.primitives[primitive_bucket(key)];
    for (; *at; at = &(*at)->next)
        if (memcmp(&(*at)->key, key, sizeof *key) == 0) return *at;
    primitive *p = need(1, sizeof *p, "kinds of products");
    p->key = *key;
    make_primitive(p);
    *at = p;
    return p;
}

// --- scratch memory of the threads, for what a kernel keeps beside its operands ---

static struct {
    char *block;
    int threads;
    size_t each; // bytes, a multiple of 64
} scratchpads;

static void primitives_take_scratch(size_t bytes, int threads)
{
    size_t each = (bytes / 64 + 1) * 64;
    if (scratchpads.threads >= threads && scratchpads.each >= each) return;
    threads = threads > scratchpads.threads ? threads : scratchpads.threads;
    each = each > scratchpads.each ? each : scratchpads.each;
    free(scratchpads.block);
    scratchpads.block = needed(aligned_alloc(64, (size_t)threads * each), "products' scratch memory");
    scratchpads.threads = threads;
    scratchpads.each = each;
}

// Runs a primitive on the caller's thread: c (+)= a b, or b = a rearranged for a reorder, which takes no c.
static void primitive_run(const primitive *p, const void *a, const void *b, float *c)
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
    for (int i = 0; i < n; i++) {
        dnnl_memory_t kept = is_reorder ? NULL : p->memories[thread * N_ARGUMENTS + i];
        must(kept ? dnnl_memory_set_data_handle(kept, places[i].out)
                  : dnnl_memory_create(&own[i], argument_of(p, i), library.engine, places[i].out));
        given[i] = (dnnl_exec_arg_t){names[i], kept ? kept : own[i]};
    }
    int threads = one_thread();
    must(dnnl_primitive_execute(p->handle, library.stream, n, given));
    omp_set_num_threads(threads);
    for (int i = 0; i < n; i++) dnnl_memory_destroy(own[i]);
}

// ---- Operands ----

// With few inner terms a product is bound by writing its result, and more terms cost little: there BF16X3 keeps three
// parts, too. The scores of attention are of this kind, and their errors matter most, since they enter an exponent.
unsigned packed_parts(precision p, uint32_t k)
{
    enum { FEW = 128 };
    return p == PRECISION_BF16 ? 1 : p == PRECISION_BF16X3 && k > FEW ? 2 : 3;
}

const char *precision_name(precision p)
{
    static const char *const names[] = {"f32", "bf16x3", "bf16"};
    return names[p];
}

precision precision_named(const char *name)
{
    precision p = PRECISION_F32;
    while (strcmp(precision_name(p), name) != 0) p++;
    return p;
}

static dnnl_data_type_t type_of(precision p)
{
    return p == PRECISION_BF16 && packed_is_native() ? dnnl_bf16 : dnnl_f32;
}

bool operand_is_plain(precision p)
{
    return !tiles_available() && type_of(p) == dnnl_f32;
}

// --- packing ---

static size_t round_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

size_t packed_bytes(precision p, uint32_t k, uint32_t n)
{
    if (tiles_available()) return tiles_b_bytes(packed_parts(p, k), k, n);
    return round_up(dnnl_memory_desc_get_size(&primitive_find_layout(type_of(p), k, n)->b));
}

size_t operand_bytes(precision p, uint32_t m, uint32_t k)
{
    if (tiles_available()) return tiles_a_bytes(packed_parts(p, k), m, k);
    return round_up((size_t)m * k * (type_of(p) == dnnl_bf16 ? sizeof(uint16_t) : sizeof(float)));
}

// Making a primitive inside a parallel region is as good as outside, since it is for one thread anyway.
void packed_store(precision p, void *to, const float *b, size_t ld, bool transposed, uint32_t k, uint32_t n)
{
    if (tiles_available()) {
        tiles_pack_b(packed_parts(p, k), to, b, ld, transposed, k, n);
        return;
    }
    primitive_key key = {.type = type_of(p), .n = n, .k = k, .ld = ld, .transposed = transposed};
    const primitive *r;
#pragma omp critical(packed_primitives)
    r = primitive_find(&key);
    primitive_run(r, b, to, NULL); // rounds by itself
}

uint32_t packed_side(precision p, uint32_t k, uint32_t n)
{
    if (!operand_is_plain(p)) return 0;
    const dnnl_memory_desc_t *d = &primitive_find_layout(dnnl_f32, k, n)->b;
    const dnnl_blocking_desc_t *by = &d->format_desc.blocking;
    if (d->format_kind != dnnl_blocked || is_padded(d)) return 0;
    if (by->inner_nblks == 0) return by->strides[0] == n && by->strides[1] == 1 ? n : 0;
    if (by->inner_nblks != 2 || by->inner_idxs[0] != 0 || by->inner_idxs[1] != 1) return 0;
    dnnl_dim_t terms = by->inner_blks[0], side = by->inner_blks[1];
    return by->strides[0] == terms * side && by->strides[1] == k * side ? (uint32_t)side : 0;
}

void operand_split(precision p, void *to, const float *x, size_t ld, uint32_t first, uint32_t rows, uint32_t k,
                   float scale)
{
    if (tiles_available()) { // before oneDNN is asked, which then need not be started
        for (uint32_t i = first; i < first + rows; i++, x += ld) tiles_pack_row(packed_parts(p, k), to, x, i, k, scale);
        return;
    }
    bool bits = type_of(p) == dnnl_bf16;
    for (uint32_t i = first; i < first + rows; i++, x += ld) {
        float *f = (float *)to + (size_t)i * k;
        if (bits) bf16_round((uint16_t *)to + (size_t)i * k, x, k, scale);
        else
            for (uint32_t c = 0; c < k; c++) f[c] = x[c] * scale;
    }
}

// --- products ---

struct product {
    precision p;
    const primitive *run;
    uint32_t m, n, k;
    bool accumulate;
    unsigned tile_parts; // not 0: the tile unit multiplies, without a primitive
    struct product *next;
};

static product *products[PRIMITIVE_BUCKETS];

static void make_product(product *made)
{
    if (tiles_available()) {
        made->tile_parts = packed_parts(made->p, made->k);
        return;
    }
    primitive_key key = {.type = type_of(made->p),
                         .m = made->m,
                         .n = made->n,
                         .k = made->k,
                         .ld = made->n,
                         .accumulate = made->accumulate};
    made->run = primitive_find(&key);
    primitives_take_scratch(dnnl_memory_desc_get_size(&made->run->scratchpad), omp_get_max_threads());
}

uint32_t product_rows(void)
{
    bool wide = (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core;
    return product_takes_any_rows() || wide ? PRODUCT_ROWS_MAX : 12;
}

void product_prepare(int threads)
{
    static int prepared; // threads
    if (threads <= prepared) return;
    primitives_take_scratch(0, threads);
    for (int i = 0; i < PRIMITIVE_BUCKETS; i++)
        for (primitive *p = library.primitives[i]; p; p = p->next) grow_memories(p, threads);
    prepared = threads;
}

const product *product_find(precision p, uint32_t m, uint32_t n, uint32_t k, bool accumulate)
{
    primitive_key key = {.type = (uint32_t)p, .m = m, .n = n, .k = k, .accumulate = accumulate};
    product **at = &products[primitive_bucket(&key)];
    for (; *at; at = &(*at)->next) {
        const product *found = *at;
        if (found->p != p || found->m != m || found->n != n || found->k != k || found->accumulate != accumulate)
            continue;
        product_prepare(omp_get_max_threads());
        return found;
    }
    product *made = need(1, sizeof *made, "kinds of products");
    *made = (product){.p = p, .m = m, .n = n, .k = k, .accumulate = accumulate};
    make_product(made);
    *at = made;
    return made;
}

void product_run(const product *p, const void *a, const void *b, float *c)
{
    if (p->tile_parts) product_run_rows(p, p->m, a, b, c, p->n, false);
    else primitive_run(p->run, a, b, c);
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
