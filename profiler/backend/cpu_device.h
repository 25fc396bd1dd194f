// What the three files of the CPU backend share. backend_cpu.c uses backend_cpu_attention.c, and both use the loops.
//
// Results have the same bits for any number of threads and any batch of questions: work is cut into tasks by shape
// alone, each task is computed by one thread in a fixed order, and products have a fixed number of rows, padded where
// rows are missing (packed.h, linalg.h).
#pragma once
#include "profiler/backend/backend_host.h"
#include "profiler/backend/packed.h"

enum {
    QUERY_TILE = 256, // context rows per attention task
    KEY_TILE = 256,   // keys per step of the online softmax
    KEY_ALIGN = 64,   // keys of the last tile are padded to a multiple of this
    // With the tile unit a task is the rows of all heads that share keys, about TASK_LINES lines. BLOCK_LINES of them
    // are multiplied with a tile of keys together: their scores, 32 KiB, stay in the first-level cache.
    TASK_LINES = 384,
    BLOCK_LINES = 32,
    MOST_BLOCKS = 4,           // of a task for oneDNN
    CACHED_FLOATS = 256 << 10, // exponentials of decoded rows that a thread comes back to: half a second-level cache
    VALUE_TILE = 512,          // context rows per step of value_weights
    // backend.context_rows: what a small model's layer makes of so many rows fits into two second-level caches.
    CONTEXT_ROWS = 256,
    // Outputs of a panel of weights: for oneDNN a multiple of its blocks; for the tile unit fewer, since its products
    // cost nothing to begin.
    PANEL = 64,
    TILE_PANEL = 32,
    OPERAND_BYTES =
        3 << 18, // of blocks of rows, if more than one, on the tile unit: they stay in the second-level cache
};

// Scratch of one thread; counts are in backend_cpu.c.
typedef struct scratch {
    float *scores;                   // [lines, KEY_TILE], [VALUE_TILE, d], or what packing needs
    float *tails;                    // [tail]
    float *outputs;                  // [lines, d], lines: cpu_max_lines()
    float *row_max, *row_sum;        // [lines]
    float *panel;                    // [PRODUCT_ROWS_MAX, PANEL]
    void *query_operand;             // [lines, d], in blocks
    void *weight_operand;            // [lines of a block, KEY_TILE]; in float32 without a tile unit, scores serve as it
    void *split_keys, *split_values; // parts of one tile, if products make them (packed_tiles.h)
    char *made;                      // a panel of weights, and what making it needs (backend_cpu.c)
} scratch;

typedef struct cpu_device {
    backend_device base;
    precision p;
    backend_limits limits; // zero: without scratch memory
    scratch *threads;      // [n_threads]
    int n_threads;         // of every parallel region that uses them
    void *operand;         // activations as products want them; in float32 one block, for rows that need padding
    size_t operand_bytes;
    // For a group of decoded rows: exponentials, [heads at hand] of tiles of [lines, keys]; and, for each line of each
    // tile of each KV head, its maximum and later its scale, its sum, and its sum of values [d].
    float *exponentials, *part_scale, *part_sum, *part_values;
    float *block; // the memory of all scratch
} cpu_device;

static inline cpu_device *cpu_of(backend_device *on)
{
    return (cpu_device *)(void *)on;
}

static inline size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

// --- backend_cpu_loops.c ---
float loop_max(const float *x, size_t n);
float loop_exp2_minus(float *e, const float *x, size_t n, float top); // e = 2^(x - top), e may be x; returns the sum
float loop_dot(const float *a, const float *b, size_t n);
void loop_scale(float *x, size_t n, float factor);
void loop_add_exp2_minus(float *columns, const float *x, size_t n, float top); // columns += 2^(x - top)
float loop_absolute_sum(const float *x, size_t n);
void loop_softcap(float *x, size_t n, float cap); // x = cap * tanh(x / cap)
void loop_rms_norm(float *y, const float *x, const float *weight, uint32_t width, float eps);
// RoPE of one row [heads,d] by its angles [rope_dim/2, 2]; y may be x.
void loop_rope(float *y, const float *x, const float *angles, uint32_t heads, uint32_t d, uint32_t rope_dim);
void loop_layer_norm(float *y, const float *x, const float *weight, uint32_t width, float eps);
void loop_glu(float *gate, const float *up, activation act, size_t n); // gate = act(gate) * up
void loop_store_tile(float *y, size_t ldy, const float *tile, uint32_t rows, uint32_t width, bool accumulate);
// line[t] = scale * q . k[t], t < n
void loop_tail_scores(float *line, const float *q, const float *k, uint32_t n, uint32_t d, float scale);
// out += sum over t < n of weights[t * weight_step] v[t], v [n,d] with lines apart by ldv
void loop_weighted_sum(float *out, const float *weights, size_t weight_step, const float *v, size_t ldv, uint32_t n,
                       uint32_t d);
typedef void importance_loop(float *importance, const float *e, size_t ld, const float *inverse, const float *w,
                             size_t ldw, uint32_t group, uint32_t n);
// importance[j] = max(importance[j], max over the group's heads of e_h[j] * inverse_h * w_h[j]), j < n
importance_loop loop_raise_importance;
// importance[j] += the same, summed over the heads
importance_loop loop_add_importance;

// --- backend_cpu_attention.c ---
// Whether attention of this shape is within the limits that the device was opened with. If not, the device has failed.
bool cpu_fits(backend_device *on, uint32_t n_tokens, attention_shape s);
// Operations of the table.
size_t cpu_packed_floats(backend_device *on, uint32_t n_tokens, attention_shape s);
void cpu_pack_prefix(backend_device *on, const prefix_kv *kv, attention_shape s);
void cpu_attend_prefix(backend_device *on, dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n,
                       attention_shape s);
void cpu_attend_rows(backend_device *on, dev o, dev q, const prefix_kv *kv, const tail_kv *tails,
                     const decode_row *rows, uint32_t n, attention_shape s, const oracle_view *oracle);
void cpu_value_weights(backend_device *on, dev w, const prefix_kv *kv, dev root, dev centre, attention_shape s);
void cpu_column_sums(backend_device *on, dev sums, dev row_log, dev q, const prefix_kv *kv, uint32_t first,
                     attention_shape s);
// Bytes of the weights of `lines` lines as an operand, for any tile: the last one may be in more parts than a whole one
// and therefore take more (packed_parts).
size_t cpu_weight_bytes(precision p, uint32_t lines);
// How many of a task's lines are multiplied with a tile of keys together: BLOCK_LINES on the tile unit. With oneDNN all
// of the prefill's, and of decoded rows all, a half or a quarter.
uint32_t cpu_most_block_lines(uint32_t lines);
uint32_t cpu_block_lines(uint32_t lines);
// The most lines of a task, a line being a row of one query head: those of attention, or QUERY_TILE for column_sums and
// output_norms.
uint32_t cpu_max_lines(attention_shape s);
// Decoded rows that attention takes at a time. A row has the same bits at any place among them (measured: with AVX2
// that takes a multiple of 4 and of 6 lines).
uint32_t cpu_row_group(void);
// Floats of cpu_device.exponentials for contexts of up to n_tokens.
size_t cpu_exponential_floats(const cpu_device *on, uint32_t n_tokens, attention_shape s);
