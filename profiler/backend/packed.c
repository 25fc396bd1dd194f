#include "profiler/backend/packed.h"
#include "profiler/backend/bf16_parts.h"
#include "profiler/backend/packed_primitives.h"
#include "profiler/backend/packed_steps.h"
#include "profiler/backend/packed_tiles.h"
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

precision precision_named(const char *name)
{
    precision p = PRECISION_F32;
    while (strcmp(precision_name(p), name) != 0) p++;
    return p;
}

bool packed_is_native(void)
{
    return primitive_bf16_is_native();
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

// --- packing ---

static size_t round_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

// Bytes of one part.
static size_t part_bytes(precision p, uint32_t k, uint32_t n)
{
    const primitive *layout = primitive_find_layout(type_of(p), is_joined(p, k) ? JOINED * k : k, n);
    return layout ? round_up(primitive_b_bytes(layout)) : 0;
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
    r = primitive_find(&key);
    return r && primitive_run(r, from, to, NULL) ? round_up(primitive_b_bytes(r)) : 0;
}

// The three parts of a joined b, lines of it apart by `line` floats and its parts by `part`.
static void store_joined(float *temp, size_t line, size_t part, const float *b, size_t ld, size_t lines, size_t length)
{
    for (size_t i = 0; i < lines; i++) {
        float *at = temp + i * line;
        parts_three(at, at + 3 * part, at + 5 * part, b + i * ld, length, 1.0f);
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
        parts_high_low(temp + i * length, temp + part + i * length, b + i * ld, length, 1.0f);
    size_t first = reorder(p, to, temp, length, transposed, k, n);
    return first && (p == PRECISION_BF16 || reorder(p, (char *)to + first, temp + part, length, transposed, k, n));
}

static void split_joined(void *to, bool bits, const float *x, uint32_t k, float scale)
{
    uint16_t *b = to;
    float *f = to;
    if (bits) {
        parts_three_bits(b, b + k, b + 2 * k, x, k, scale);
        memcpy(b + 3 * k, b, 2 * k * sizeof *b);
        memcpy(b + 5 * k, b, k * sizeof *b);
    } else {
        parts_three(f, f + k, f + 2 * k, x, k, scale);
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
    bool joined = is_joined(p, k), bits = type_of(p) == dnnl_bf16;
    size_t step = joined ? JOINED * (size_t)k : k, to_low = (size_t)m * k;
    for (uint32_t i = first; i < first + rows; i++, x += ld) {
        uint16_t *b = (uint16_t *)to + i * step;
        float *f = (float *)to + i * step;
        if (p == PRECISION_F32) {
            for (uint32_t c = 0; c < k; c++) f[c] = x[c] * scale;
        } else if (joined) {
            split_joined(bits ? (void *)b : (void *)f, bits, x, k, scale);
        } else if (p == PRECISION_BF16 && bits) {
            parts_high_bits(b, x, k, scale);
        } else if (p == PRECISION_BF16) {
            parts_high(f, x, k, scale);
        } else if (bits) {
            parts_high_low_bits(b, b + to_low, x, k, scale);
        } else {
            parts_high_low(f, f + to_low, x, k, scale);
        }
    }
}

// --- products ---

struct product {
    precision p;
    const primitive *first, *more; // `more` adds to c what the first began
    uint32_t m, n, k;
    size_t b_part;
    bool accumulate;
    unsigned tile_parts; // not 0: the tile unit's, no primitives
    struct product *next;
};

static product *products[PRIMITIVE_BUCKETS];

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
    made->first = primitive_find(&key);
    made->more = made->first;
    if (made->p == PRECISION_BF16X3 && !joined) {
        key.accumulate = true;
        made->more = primitive_find(&key);
        made->b_part = part_bytes(made->p, made->k, made->n);
    }
    return made->first && made->more &&
           primitives_take_scratch(primitive_scratch_bytes(made->first), omp_get_max_threads()) &&
           primitives_take_scratch(primitive_scratch_bytes(made->more), omp_get_max_threads());
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
    bool ok = primitives_take_scratch(0, threads) && primitives_serve(threads);
    if (ok) prepared = threads;
    return ok;
}

const product *product_find(precision p, uint32_t m, uint32_t n, uint32_t k, bool accumulate)
{
    primitive_key key = {.type = (uint32_t)p, .m = m, .n = n, .k = k, .accumulate = accumulate};
    product **at = &products[primitive_bucket(&key)];
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
    bool ok = primitive_run(p->first, a, b, c);
    if (p->b_part) {
        const char *low_a = (const char *)a + (size_t)p->m * p->k * type_size(type_of(p->p));
        ok = ok && primitive_run(p->more, low_a, b, c) && primitive_run(p->more, a, (const char *)b + p->b_part, c);
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
    return primitive_run(p->first, a, b, c) && primitive_run(p->more, low_a, b, c);
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
