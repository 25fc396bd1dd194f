// Scratch memory of a CPU device: one table of (pointer, floats) for each thread and one for what threads share, from
// which its size, its layout and its checks are made. Every count covers the largest of its users, named beside it;
// what an operation needs beyond the limits that the device was opened with is refused before it begins.
#include "profiler/backend/backend_cpu_weights.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/packed_tiles.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define GUARDS_ARE_POISONED 1
#else
#define GUARDS_ARE_POISONED 0
#define ASAN_POISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
#endif

enum { CACHE_LINE = 16, GUARD = CACHE_LINE, N_THREAD_PIECES = 12, N_SHARED_PIECES = 5 }; // in floats

typedef struct piece {
    const char *name;
    size_t offset; // of a pointer in struct scratch or cpu_device
    size_t floats;
} piece;

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t floats_of(size_t bytes)
{
    return (bytes + sizeof(float) - 1) / sizeof(float);
}

size_t cpu_pack_floats(uint32_t d)
{
    size_t most = packed_temp_floats(d, KEY_TILE);
    for (uint32_t keys = KEY_ALIGN; keys <= KEY_TILE; keys += KEY_ALIGN)
        most = larger(most, packed_temp_floats(keys, d));
    return most;
}

size_t cpu_weight_bytes(precision p, uint32_t lines)
{
    size_t most = 0;
    for (uint32_t keys = KEY_ALIGN; keys <= KEY_TILE; keys += KEY_ALIGN)
        most = larger(most, operand_bytes(p, lines, keys));
    return most;
}

// Scores of a tile of rows, or of a block of lines, with a tile of keys (attention, column_sums); a tile of values
// times a root (value_weights), or times rows of W_O (output_norms); or what packing a tile of keys needs beside its
// padded copy.
static size_t score_floats(precision p, attention_shape s)
{
    size_t d = s.head_dim, block = cpu_block_lines(cpu_max_lines(s)),
           floats = larger(larger(QUERY_TILE, block) * KEY_TILE, VALUE_TILE * d);
    if (operand_is_plain(p)) return floats;
    return larger(floats, cpu_pack_floats((uint32_t)d) + KEY_TILE * d);
}

static void list_thread(piece out[N_THREAD_PIECES], precision p, const backend_limits *limits)
{
    uint32_t d = limits->shape.head_dim, lines = cpu_max_lines(limits->shape);
    bool splits = tiles_available() && p != PRECISION_BF16; // bf16x3 has three parts where products are small
    const piece all[N_THREAD_PIECES] = {
        {"scores", offsetof(scratch, scores), score_floats(p, limits->shape)},
        {"tails", offsetof(scratch, tails), limits->tail},
        {"queries", offsetof(scratch, queries), (size_t)lines * d},
        {"outputs", offsetof(scratch, outputs), larger((size_t)lines * d, KEY_TILE)}, // column_sums: sums of a tile
        {"row_max", offsetof(scratch, row_max), lines},
        {"row_sum", offsetof(scratch, row_sum), lines},
        {"panel", offsetof(scratch, panel), PRODUCT_ROWS_MAX * PANEL},
        {"query_operand", offsetof(scratch, query_operand),
         operand_is_plain(p) ? 0 : floats_of(operand_bytes(p, lines, d))},
        {"weight_operand", offsetof(scratch, weight_operand),
         operand_is_plain(p) ? 0 : floats_of(cpu_weight_bytes(p, cpu_block_lines(lines)))},
        {"split_keys", offsetof(scratch, split_keys), splits ? floats_of(tiles_split_bytes(3, d, KEY_TILE)) : 0},
        {"split_values", offsetof(scratch, split_values), splits ? floats_of(tiles_split_bytes(3, KEY_TILE, d)) : 0},
        {"made", offsetof(scratch, made), floats_of(packed_made_bytes(p, limits->made_terms))},
    };
    memcpy(out, all, sizeof all);
}

// A block of the widest rows: many blocks of those that most matrices have. oneDNN has two, or all rows of a pass where
// panels are made anew for each product; in float32 it uses rows where they are.
static size_t operand_floats(precision p, const backend_limits *limits)
{
    size_t one = floats_of(operand_bytes(p, PRODUCT_ROWS_MAX, limits->matrix_dim)), all = 0;
    if (limits->made_terms)
        all = floats_of(operand_bytes(p, PRODUCT_ROWS_MAX, limits->made_terms)) *
              ((limits->rows + PRODUCT_ROWS_MAX - 1) / PRODUCT_ROWS_MAX);
    if (tiles_available()) return larger(one, OPERAND_BYTES / sizeof(float));
    return operand_is_plain(p) ? one : larger(2 * one, all);
}

static void list_shared(piece out[N_SHARED_PIECES], const cpu_device *on, const backend_limits *limits)
{
    size_t lines = (size_t)cpu_row_group() * limits->shape.n_heads,
           parts = lines * ((limits->tokens + KEY_TILE - 1) / KEY_TILE);
    const piece all[N_SHARED_PIECES] = {
        {"operand", offsetof(cpu_device, operand), operand_floats(on->p, limits)},
        {"exponentials", offsetof(cpu_device, exponentials), cpu_exponential_floats(on, limits->tokens, limits->shape)},
        {"part_scale", offsetof(cpu_device, part_scale), parts},
        {"part_sum", offsetof(cpu_device, part_sum), parts},
        {"part_values", offsetof(cpu_device, part_values), parts * limits->shape.head_dim},
    };
    memcpy(out, all, sizeof all);
}

// Floats that a piece takes with the guard behind it.
static size_t piece_step(const piece *p)
{
    return (p->floats + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE + GUARD;
}

// What happens to every piece in turn, where it is: `to` is the pointer to it.
typedef bool piece_visit(const piece *p, float **to, float *at);

// Goes through all pieces of a device in the order of its memory. False where a visit was; *found is its piece then.
static bool visit_pieces(cpu_device *on, piece_visit *visit, const char **found)
{
    piece shared[N_SHARED_PIECES], each[N_THREAD_PIECES];
    float *at = on->block;
    list_shared(shared, on, &on->limits);
    list_thread(each, on->p, &on->limits);
    for (int i = 0; i < N_SHARED_PIECES; at += piece_step(&shared[i++]))
        if (!visit(&shared[i], (float **)(void *)((char *)on + shared[i].offset), at)) {
            *found = shared[i].name;
            return false;
        }
    for (int t = 0; t < on->n_threads; t++)
        for (int i = 0; i < N_THREAD_PIECES; at += piece_step(&each[i++]))
            if (!visit(&each[i], (float **)(void *)((char *)&on->threads[t] + each[i].offset), at)) {
                *found = each[i].name;
                return false;
            }
    return true;
}

static size_t all_floats(const cpu_device *on, const backend_limits *limits)
{
    piece shared[N_SHARED_PIECES], each[N_THREAD_PIECES];
    size_t all = 0, thread = 0;
    list_shared(shared, on, limits);
    list_thread(each, on->p, limits);
    for (int i = 0; i < N_SHARED_PIECES; i++) all += piece_step(&shared[i]);
    for (int i = 0; i < N_THREAD_PIECES; i++) thread += piece_step(&each[i]);
    return all + thread * (size_t)on->n_threads;
}

uint64_t cpu_scratch_bytes(backend_device *on, const backend_limits *limits)
{
    return all_floats(cpu_of(on), limits) * sizeof(float);
}

static const uint32_t GUARD_BITS = 0x7fc0beefu; // a NaN that no operation makes

// Points to a piece, and puts the guard behind its last float.
static bool place(const piece *p, float **to, float *at)
{
    *to = at;
    for (float *guard = at + p->floats; guard < at + piece_step(p); guard++)
        memcpy(guard, &GUARD_BITS, sizeof GUARD_BITS);
    ASAN_POISON_MEMORY_REGION(at + p->floats, (piece_step(p) - p->floats) * sizeof(float));
    return true;
}

static bool is_whole(const piece *p, float **to, float *at)
{
    (void)to;
    for (const float *guard = at + p->floats; guard < at + piece_step(p); guard++)
        if (memcmp(guard, &GUARD_BITS, sizeof GUARD_BITS) != 0) return false;
    return true;
}

bool cpu_scratch_take(cpu_device *on, const backend_limits *limits)
{
    const char *found;
    on->limits = *limits;
    on->operand_bytes = operand_floats(on->p, limits) * sizeof(float);
    on->threads = calloc((size_t)on->n_threads, sizeof *on->threads);
    on->block = host_memory(all_floats(on, limits));
    for (int t = 0; on->threads && t < on->n_threads; t++) on->threads[t].on = on;
    return on->threads && on->block && visit_pieces(on, place, &found);
}

void cpu_scratch_release(cpu_device *on)
{
    free(on->threads);
    free(on->block);
}

kvb_status cpu_check(backend_device *on, kvb_error *err)
{
    const char *found;
    if (cpu_of(on)->block && !GUARDS_ARE_POISONED && !visit_pieces(cpu_of(on), is_whole, &found))
        backend_fail(on, KVB_NUMERIC,
                     "backend cpu: an operation wrote beyond its scratch memory '%s'; no number since then is valid; "
                     "please report this with the model's shape",
                     found);
    return host_check(on, err);
}

bool cpu_fits(backend_device *on, uint32_t n_tokens, attention_shape s)
{
    const backend_limits *most = &cpu_of(on)->limits;
    const attention_shape *shape = &most->shape;
    if (n_tokens <= most->tokens && s.n_heads == shape->n_heads && s.n_kv_heads == shape->n_kv_heads &&
        s.head_dim == shape->head_dim)
        return true;
    backend_fail(on, KVB_ARGUMENT,
                 "backend cpu: attention over %u tokens of %u:%u heads of %u, opened for up to %u of %u:%u heads of %u",
                 n_tokens, s.n_heads, s.n_kv_heads, s.head_dim, most->tokens, shape->n_heads, shape->n_kv_heads,
                 shape->head_dim);
    return false;
}

void cpu_gemm(const scratch *s, bool trans_a, bool trans_b, size_t m, size_t n, size_t k, float alpha, const float *a,
              size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
    if (!gemm(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)) cpu_product_failed(s->on);
}

void cpu_product_failed(cpu_device *on)
{
    backend_fail(&on->base, KVB_MEMORY,
                 "backend %s: oneDNN had no memory for a product; use fewer threads or shorter contexts",
                 on->base.b->name);
}
