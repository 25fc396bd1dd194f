// Attention over tiles of rows and keys. In plain float32 the keys and values are read where they stand; else from
// tiles that pack_prefix made once per layer. Softmax, importance, and each decoded row's own tail are float32 in all
// of them.
//
// A line is a row of one query head. oneDNN multiplies all lines of a task with a tile of keys at once; the tile unit a
// block of few lines at a time, whose scores and weights go from one product through the softmax into the other without
// leaving the first-level cache.
#pragma once
#include "profiler/backend/backend_cpu.h"

// The packed keys and values of one head: tile after tile, K [d, keys] then V [keys, d].
typedef struct tile_plan {
    uint32_t n_tiles, last_keys; // last_keys is padded
    size_t k_bytes, tile_bytes, last_k_bytes, head_bytes;
} tile_plan;

// A tile of packed keys as a block of lines meets it.
typedef struct key_tile {
    const char *keys, *values;
    uint32_t number, width; // width: its keys with their padding
    bool is_split;          // an earlier block has left the parts in scratch
} key_tile;

// What blocks of lines have in common.
typedef struct block_plan {
    precision p;
    attention_shape shape;
    uint32_t d, lines; // of a block
    bool gather;       // values are added to what the outputs hold
    tile_plan tiles;
    const product *scores, *last_scores, *values, *last_values; // oneDNN's
} block_plan;

static inline uint32_t cpu_round_up(uint32_t n, uint32_t step)
{
    return (n + step - 1) / step * step;
}

// The i-th tile of KV head g.
key_tile cpu_find_tile(const tile_plan *plan, const prefix_kv *kv, uint32_t g, uint32_t i);
// For tasks of `lines` lines. Outside of parallel regions; false when oneDNN has no memory.
bool cpu_plan_blocks(block_plan *b, precision p, uint32_t n_tokens, attention_shape s, uint32_t lines, bool gather);
// Query operand of the block that begins with line `line`.
char *cpu_queries_of(const scratch *s, const block_plan *b, uint32_t line);
// scores [lines, width] = queries times keys; of `seen` keys at least.
void cpu_block_scores(const scratch *s, const block_plan *b, const key_tile *t, uint32_t line, uint32_t lines,
                      uint32_t seen);
// outputs [lines, d] (+)= weights times values, of the first `seen` keys, the other weights being zero.
void cpu_block_values(const scratch *s, const block_plan *b, const key_tile *t, uint32_t lines, uint32_t seen,
                      float *outputs);
// The largest of x [n].
float cpu_line_max(const float *x, uint32_t n);
// Line r of the weights: 2^(x - top) of the first n scores, then zeros, for the product with `seen` keys. They go to
// `keep` too, unless it is NULL; x need not outlive this. Returns their sum.
float cpu_line_weights(const scratch *s, const block_plan *b, const key_tile *t, uint32_t r, float *x, uint32_t n,
                       uint32_t seen, float top, float *keep);
// Line r has met a score of `top`: what it has gathered is rescaled if none was larger yet.
void cpu_raise_max(scratch *s, uint32_t r, float top, uint32_t d);
