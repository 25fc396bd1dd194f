// Convex hulls of the loss curves by pooling adjacent violators.
// Greedy allocation is optimal if every further token gains less than the one before. Real curves have bumps, so the
// gains are made non-increasing first: isotonic regression on the gains a_1 .. a_M, which is the same as the greatest
// convex minorant (lower hull) of the loss curve (LU-KV section 4.2; methods.md 2.4; the LP-undominated items of Sinha
// and Zoltners 1979):
//
//     loss |o               o  block ends: hull and curve meet        blocks of the gains 30 5 25 10 2 8 12 8:
//          | \   *          *  curve above the hull, inside a block      (30) (5 25) (10) (2 8 12 8)
//          |  \__            every token of a block is worth the same,   mean 30, 15, 10, 7.5
//          |     o \_ *      so a head should stop at block ends only
//          |         o-__*
//          |              o
//          +----------------- c
#pragma once
#include "solver/curve.h"

typedef enum hull_range {
    HULL_FEASIBLE, // only over the range that the floor allows: c = floor - |P| .. M. Use this one
    HULL_FULL      // as in the published code: over c = 0 .. M, f32 sums and slopes; the floor may cut a block
} hull_range;

typedef struct hull_block {
    double sum;      // of the gains in the block
    double slope;    // sum / length: gain of each of its tokens
    uint32_t length; // tokens
} hull_block;

// Pools gains[n] (>= 0) into blocks with non-increasing means, first token first; returns their number (<= n; blocks
// has room for n). Two blocks merge when the earlier mean is strictly below the later one, compared without division.
size_t pava_blocks(hull_block *blocks, const double *gains, size_t n);

// The same blocks from gains[n] and their curve loss[n + 1], where loss[i] is the sum of the gains from i on. The sums
// may differ by rounding; several times as fast on noisy curves.
size_t curve_blocks(hull_block *blocks, const double *gains, const double *loss, size_t n);

// The hull that the published step 2 makes: losses summed in f32 while tokens are dropped from the last to the first,
// the lower hull in f64 without collinear points, slopes stored as f32. Blocks come in the same order as from
// pava_blocks.
size_t published_blocks(hull_block *blocks, const double *gains, size_t n);

// The hulls of all heads of one problem.
typedef struct hulls {
    uint32_t n_heads, stride; // stride = M: blocks of head n are block[n * stride] .. + count[n] - 1
    uint32_t first;           // middle tokens before the first block: floor - |P|, or 0 for HULL_FULL
    uint32_t *count;          // [N]
    hull_block *block;        // [N, M]
} hulls;

// Memory for a problem's shape, to be used again for further problems of this shape.
void hulls_init(hulls *h, const cache_shape *shape);
void hulls_free(hulls *h);
kvb_status hulls_fill(hulls *h, const loss_curves *c, hull_range range, kvb_error *err);
