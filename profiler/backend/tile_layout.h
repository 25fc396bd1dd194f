// How the tile unit's operands lie in memory: what packs them (packed_tiles.c) and what multiplies them
// (packed_tiles_multiply.c) go by.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 11)
#include "profiler/backend/tile_unit.h"
#define TILE_UNIT_BUILT 1
#else
#define TILE_UNIT_BUILT 0
#endif

// A tile has 16 rows of 64 bytes. One of a: 16 rows of 32 terms. One of b: 16 pairs of terms, each of 16 columns, the
// two of a pair side by side. a is stored as [row blocks][term blocks][parts] tiles, b as [pairs of column blocks][term
// blocks][parts][2] tiles, so that a product walks through both from front to back. Three parts are half as many bytes
// again as the float32 that they come from, and what decoding waits for is memory: there b stays float32, in the order
// of its tiles, and is split while the first rows meet it.
enum {
    TERMS = 32,
    COLUMNS = 32,
    TILE_BYTES = 1024,
    LINE = 64,
    LINES = 32, // of a block of terms of a pair of column blocks
    SPLIT_PARTS = 3,
    SPLIT_BYTES = 2 * SPLIT_PARTS * TILE_BYTES
};

static inline size_t blocks_of(size_t n, size_t each)
{
    return (n + each - 1) / each;
}

// Of one block of terms of a pair of column blocks, as it is stored.
static inline size_t b_block_bytes(unsigned parts)
{
    return parts == SPLIT_PARTS ? TERMS * COLUMNS * sizeof(float) : parts * 2 * TILE_BYTES;
}
