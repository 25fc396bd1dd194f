// Which tokens stay: the stable top-b of one head's scores, without allocating and without sorting.
//
// A score becomes a 32-bit key that is ordered like the float. Three histogram passes (11 + 11 + 10 bits, radix
// select) find the lowest key that still gets in and how many tokens with exactly that key do; a fourth pass writes
// positions in ascending order, taking equal keys from the front. That is what a stable descending sort would keep.
#include "fail.h"
#include "kvbudget.h"
#include <string.h>

// The tokens that scores decide about are [begin, end); all others are protected.
typedef struct middle {
    uint32_t begin, end;
} middle;

static middle find_middle(uint32_t n_tokens, uint32_t sink, uint32_t window)
{
    middle m;
    m.begin = sink < n_tokens ? sink : n_tokens;
    m.end = window < n_tokens - m.begin ? n_tokens - window : m.begin;
    return m;
}

// Unsigned keys in the order of the floats: positive ones get the sign bit set, negative ones are turned upside down.
static inline uint32_t order_key(float score)
{
    float plus_zero = score + 0.0f; // -0 becomes +0, all others stay
    uint32_t bits;
    memcpy(&bits, &plus_zero, sizeof bits);
    return bits ^ (0x80000000u | (0u - (bits >> 31)));
}

// Bins from the top until `*k` tokens are covered: returns the bin of the k-th and leaves in *k its rank in that bin.
static uint32_t find_bin(const uint32_t *histogram, uint32_t n_bins, uint32_t *k)
{
    uint32_t bin = n_bins - 1;
    for (; *k > histogram[bin]; --bin) *k -= histogram[bin];
    return bin;
}

// The k-th largest key, 1 <= k <= m.end - m.begin; *k becomes the number of tokens with that key that get in.
// Returns the position of a NaN, or m.end when there is none.
static uint32_t find_threshold(const float *scores, middle m, uint32_t *k, uint32_t *threshold)
{
    uint32_t histogram[2048] = {0}, prefix;
    for (uint32_t i = m.begin; i < m.end; i++) {
        if (scores[i] != scores[i]) return i;
        ++histogram[order_key(scores[i]) >> 21];
    }
    prefix = find_bin(histogram, 2048, k);
    for (int pass = 0; pass < 2; pass++) {
        unsigned shift = pass == 0 ? 10 : 0, bits = pass == 0 ? 11 : 10;
        uint32_t mask = (1u << bits) - 1;
        memset(histogram, 0, sizeof histogram);
        for (uint32_t i = m.begin; i < m.end; i++) {
            uint32_t key = order_key(scores[i]);
            histogram[key >> shift & mask] += key >> (shift + bits) == prefix; // without a branch, as below
        }
        prefix = prefix << bits | find_bin(histogram, 1u << bits, k);
    }
    *threshold = prefix;
    return m.end;
}

// Writes min(keep, n_tokens) positions. KVB_NUMERIC with *nan_at set when a score is NaN.
static kvb_status select_head(const float *scores, uint32_t n_tokens, uint32_t keep, uint32_t sink, uint32_t window,
                              uint32_t *positions, uint32_t *nan_at)
{
    middle m = find_middle(n_tokens, sink, window);
    uint32_t n_protected = m.begin + (n_tokens - m.end), n = 0, ties = 0, threshold = 0;

    if (keep < n_tokens && keep > n_protected) {
        ties = keep - n_protected;
        *nan_at = find_threshold(scores, m, &ties, &threshold);
        if (*nan_at < m.end) return KVB_NUMERIC;
    }
    keep = keep < n_tokens ? keep : n_tokens;
    for (uint32_t i = 0; i < m.begin && n < keep; i++) positions[n++] = i;
    if (keep == n_tokens) {
        for (uint32_t i = m.begin; i < m.end; i++) positions[n++] = i;
    } else if (keep > n_protected) {
        uint32_t last = keep - (n_tokens - m.end);
        for (uint32_t i = m.begin; n < last; i++) {
            // No branch on the score: which tokens stay is close to random, and mispredictions would cost most of the
            // time.
            uint32_t key = order_key(scores[i]);
            uint32_t tied = (uint32_t)(key == threshold) & (uint32_t)(ties > 0);
            positions[n] = i;
            n += tied | (uint32_t)(key > threshold);
            ties -= tied;
        }
    }
    for (uint32_t i = m.end; i < n_tokens && n < keep; i++) positions[n++] = i;
    return KVB_OK;
}

kvb_status kvb_select(const float *scores, uint32_t n_tokens, uint32_t keep, uint32_t sink, uint32_t window,
                      uint32_t *positions, size_t cap, kvb_error *err)
{
    uint32_t needed = keep < n_tokens ? keep : n_tokens, nan_at = 0;
    if (!scores || !positions) return kvb_fail(err, KVB_ARGUMENT, "kvb_select: scores and positions must not be NULL");
    if (cap < needed) {
        return kvb_fail(err, KVB_CAPACITY, "kvb_select: positions: expected room for %u, found %zu", (unsigned)needed,
                        cap);
    }
    if (select_head(scores, n_tokens, keep, sink, window, positions, &nan_at)) {
        return kvb_fail(err, KVB_NUMERIC, "kvb_select: scores[%u]: expected a number, found NaN; check the scorer",
                        (unsigned)nan_at);
    }
    return KVB_OK;
}

kvb_status kvb_select_all(const float *scores, size_t n_heads, uint32_t n_tokens, const uint32_t *keep, uint32_t sink,
                          uint32_t window, size_t *offsets, uint32_t *positions, size_t cap, kvb_error *err)
{
    if (!scores || !keep || !offsets || !positions)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_select_all: scores, keep, offsets and positions must not be NULL");
    if (n_tokens > 0 && n_heads > SIZE_MAX / sizeof(float) / n_tokens) {
        return kvb_fail(err, KVB_ARGUMENT, "kvb_select_all: %zu heads of %u scores do not fit into memory", n_heads,
                        (unsigned)n_tokens);
    }
    offsets[0] = 0;
    for (size_t h = 0; h < n_heads; h++) {
        uint32_t needed = keep[h] < n_tokens ? keep[h] : n_tokens, nan_at = 0;
        if (cap - offsets[h] < needed) {
            return kvb_fail(err, KVB_CAPACITY,
                            "kvb_select_all: positions: no room for the %u of head %zu after %zu, found %zu",
                            (unsigned)needed, h, offsets[h], cap);
        }
        if (select_head(scores + h * n_tokens, n_tokens, keep[h], sink, window, positions + offsets[h], &nan_at)) {
            return kvb_fail(err, KVB_NUMERIC,
                            "kvb_select_all: scores[%zu, %u]: expected a number, found NaN; check the scorer", h,
                            (unsigned)nan_at);
        }
        offsets[h + 1] = offsets[h] + needed;
    }
    return KVB_OK;
}
