// Keys and values in fewer bits, grouped as KIVI does (arXiv 2402.02750): keys by channel over neighbouring tokens,
// since their outliers stay in a channel; values by token over neighbouring channels. docs/bits.md.
#include "fail.h"
#include "kvbudget.h"
#include "vector.h"
#include <math.h>
#include <string.h>

static const struct {
    const char *name;
    unsigned bits;
} PACKINGS[KVB_PACKINGS] = {{"bf16", 16}, {"int8", 8}, {"int4", 4}, {"int2", 2}};

enum { GROUP_HEAD = 4 }; // bytes before a group's codes: its least number and its step, as bfloat16

const char *kvb_packing_name(kvb_packing p)
{
    return (unsigned)p < KVB_PACKINGS ? PACKINGS[p].name : NULL;
}

// Bytes of a group of n numbers.
static size_t group_bytes(kvb_packing p, uint32_t n)
{
    return n ? GROUP_HEAD + (n * PACKINGS[p].bits + 7) / 8 : 0;
}

size_t kvb_packed_bytes(kvb_packing p, kvb_side side, uint32_t n_tokens, uint32_t head_dim)
{
    uint32_t lines = side == KVB_KEYS ? head_dim : n_tokens, along = side == KVB_KEYS ? n_tokens : head_dim;
    if ((unsigned)p >= KVB_PACKINGS) return 0;
    if (p == KVB_PACK_BF16) return (size_t)n_tokens * head_dim * 2;
    return lines * (along / KVB_PACK_GROUP * group_bytes(p, KVB_PACK_GROUP) + group_bytes(p, along % KVB_PACK_GROUP));
}

// ---- bfloat16: the upper half of a float ----

static float widen(const unsigned char *from)
{
    uint32_t bits = ((uint32_t)from[0] << 16) | ((uint32_t)from[1] << 24);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Adds `up` to the 16 bits that are dropped before they go: 0 rounds towards 0, 0xffff away from it.
static void narrow(unsigned char *to, float x, uint32_t up)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits += up;
    to[0] = (unsigned char)(bits >> 16);
    to[1] = (unsigned char)(bits >> 24);
}

static void narrow_nearest(unsigned char *to, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    narrow(to, x, 0x7fff + (bits >> 16 & 1));
}

// ---- One group: n numbers that are `step` apart ----

// Computes each number's code. Adding and subtracting 1.5 * 2^23 rounds to the nearest whole number, as rintf does.
VECTOR_CLONES static void find_codes(unsigned char *codes, const float *x, uint32_t n, float low, float size,
                                     unsigned most)
{
    const float whole = 12582912.0f;
    for (uint32_t i = 0; i < n; i++) {
        float code = (x[i] - low) / size + whole - whole;
        code = code > 0 ? code : 0;
        codes[i] = (unsigned char)(code < (float)most ? code : (float)most);
    }
}

// A byte holds neighbouring codes, the first one in its lowest bits. Callers pass `bits` as a constant, so that the
// loops unroll.
static inline void join_codes(unsigned char *to, const unsigned char *codes, size_t bytes, unsigned bits)
{
    for (size_t i = 0; i < bytes; i++) {
        unsigned all = 0;
        for (unsigned k = 0; k < 8 / bits; k++) all |= (unsigned)codes[i * (8 / bits) + k] << k * bits;
        to[i] = (unsigned char)all;
    }
}

static inline void split_codes(unsigned char *codes, const unsigned char *from, size_t bytes, unsigned bits)
{
    for (size_t i = 0; i < bytes; i++)
        for (unsigned k = 0; k < 8 / bits; k++) codes[i * (8 / bits) + k] = from[i] >> k * bits & ((1u << bits) - 1);
}

typedef int32_t mask __attribute__((vector_size(32)));

// Finds the least and the greatest of a group. Returns NaN if a number is not finite, else 0.
VECTOR_CLONES static float find_range(float *low, float *high, const float x[KVB_PACK_GROUP])
{
    enum { LANES = sizeof(vector) / sizeof(float) };
    vector lows, highs, now, sums = {0};
    float sum = 0;
    memcpy(&lows, x, sizeof lows);
    highs = lows;
    for (uint32_t i = 0; i < KVB_PACK_GROUP; i += LANES) {
        memcpy(&now, x + i, sizeof now);
        mask less = now < lows;
        mask more = now > highs;
        lows = (vector)(((mask)now & less) | ((mask)lows & ~less));
        highs = (vector)(((mask)now & more) | ((mask)highs & ~more));
        sums += now * 0;
    }
    *low = *high = x[0];
    for (uint32_t i = 0; i < LANES; i++) {
        *low = lows[i] < *low ? lows[i] : *low;
        *high = highs[i] > *high ? highs[i] : *high;
        sum += sums[i];
    }
    return sum;
}

// The least number is rounded down and the step up, so that no number is outside the range. Returns 0 if a number is
// not finite, or is too large for bfloat16.
static int pack_group(unsigned char *to, kvb_packing p, const float *from, size_t step, uint32_t n)
{
    unsigned bits = PACKINGS[p].bits, most = (1u << bits) - 1;
    size_t bytes = group_bytes(p, n) - GROUP_HEAD;
    float x[KVB_PACK_GROUP], low, high;
    unsigned char codes[KVB_PACK_GROUP] = {0};
    for (uint32_t i = 0; i < KVB_PACK_GROUP; i++) x[i] = from[i < n ? i * step : 0];
    float sum = find_range(&low, &high, x);
    narrow(to, low, low < 0 ? 0xffff : 0);
    low = widen(to);
    narrow(to + 2, high / (float)most - low / (float)most, 0xffff);
    float size = widen(to + 2);
    to += GROUP_HEAD;
    if (sum != 0 || !isfinite(low) || !isfinite(size)) return 0;
    if (size > 0) find_codes(codes, x, n, low, size, most);
    if (bits == 8) memcpy(to, codes, bytes);
    else if (bits == 4) join_codes(to, codes, bytes, 4);
    else join_codes(to, codes, bytes, 2);
    return 1;
}

static void unpack_group(float *x, size_t step, uint32_t n, kvb_packing p, const unsigned char *from)
{
    size_t bytes = group_bytes(p, n) - GROUP_HEAD;
    unsigned char codes[KVB_PACK_GROUP];
    float low = widen(from), size = widen(from + 2);
    from += GROUP_HEAD;
    if (PACKINGS[p].bits == 8) memcpy(codes, from, bytes);
    else if (PACKINGS[p].bits == 4) split_codes(codes, from, bytes, 4);
    else split_codes(codes, from, bytes, 2);
    for (uint32_t i = 0; i < n; i++) x[i * step] = low + size * (float)codes[i];
}

// ---- All groups of a head. Keys: blocks of 32 tokens, and the channels within each. Values: tokens, and blocks of 32
// channels within each ----

typedef struct group_walk {
    uint32_t outer, n_outer, step_outer, inner, n_inner, step_inner;
    size_t at, step; // the group's first number, and the distance from each to the next
    uint32_t n;
} group_walk;

static group_walk walk_groups(kvb_side side, uint32_t n_tokens, uint32_t head_dim)
{
    if (side == KVB_KEYS) return (group_walk){0, n_tokens, KVB_PACK_GROUP, 0, head_dim, 1, 0, head_dim, 0};
    return (group_walk){0, n_tokens, 1, 0, head_dim, KVB_PACK_GROUP, 0, 1, 0};
}

static int next_group(group_walk *w, uint32_t head_dim)
{
    if (w->inner >= w->n_inner) {
        w->inner = 0;
        w->outer += w->step_outer;
    }
    if (w->outer >= w->n_outer || w->n_inner == 0) return 0;
    w->at = (size_t)w->outer * head_dim + w->inner;
    w->n = w->step_outer > 1 ? w->n_outer - w->outer : w->n_inner - w->inner;
    if (w->n > KVB_PACK_GROUP) w->n = KVB_PACK_GROUP;
    w->inner += w->step_inner;
    return 1;
}

kvb_status kvb_pack(kvb_packing p, kvb_side side, const float *rows, uint32_t n_tokens, uint32_t head_dim, void *packed,
                    kvb_error *err)
{
    unsigned char *to = packed;
    if ((unsigned)p >= KVB_PACKINGS || !rows || !packed)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_pack: rows and packed must not be NULL, and packing %d be one of %d",
                        (int)p, KVB_PACKINGS);
    if (p == KVB_PACK_BF16) {
        for (size_t i = 0; i < (size_t)n_tokens * head_dim; i++) narrow_nearest(to + 2 * i, rows[i]);
        return KVB_OK;
    }
    for (group_walk w = walk_groups(side, n_tokens, head_dim); next_group(&w, head_dim);) {
        if (!pack_group(to, p, rows + w.at, w.step, w.n))
            return kvb_fail(err, KVB_NUMERIC,
                            "kvb_pack: %s: token %zu, channel %zu and its group: expected finite numbers",
                            side == KVB_KEYS ? "keys" : "values", w.at / head_dim, w.at % head_dim);
        to += group_bytes(p, w.n);
    }
    return KVB_OK;
}

kvb_status kvb_unpack(kvb_packing p, kvb_side side, const void *packed, uint32_t n_tokens, uint32_t head_dim,
                      float *rows, kvb_error *err)
{
    const unsigned char *from = packed;
    if ((unsigned)p >= KVB_PACKINGS || !rows || !packed)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_unpack: rows and packed must not be NULL, and packing %d be one of %d",
                        (int)p, KVB_PACKINGS);
    if (p == KVB_PACK_BF16) {
        for (size_t i = 0; i < (size_t)n_tokens * head_dim; i++) rows[i] = widen(from + 2 * i);
        return KVB_OK;
    }
    for (group_walk w = walk_groups(side, n_tokens, head_dim); next_group(&w, head_dim);) {
        unpack_group(rows + w.at, w.step, w.n, p, from);
        from += group_bytes(p, w.n);
    }
    return KVB_OK;
}
