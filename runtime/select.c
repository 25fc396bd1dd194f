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

// Unsigned keys in the order of the floats: positive ones get the sign bit set, negative ones have all bits inverted.
static inline uint32_t order_key(float score)
{
    float plus_zero = score + 0.0f; // -0 becomes +0, all others stay
    uint32_t bits;
    memcpy(&bits, &plus_zero, sizeof bits);
    return bits ^ (0x80000000u | (0u - (bits >> 31)));
}

// Walks down the bins until *k tokens are covered. Returns the bin of the k-th, and leaves its rank in that bin in *k.
static uint32_t find_bin(const uint32_t *histogram, uint32_t n_bins, uint32_t *k)
{
    uint32_t bin = n_bins - 1;
    for (; *k > histogram[bin]; --bin) *k -= histogram[bin];
    return bin;
}

// Finds the k-th largest key, 1 <= k <= m.end - m.begin; *k becomes the number of tokens with that key that get in.
// Returns the position of a NaN, or m.end if there is none.
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

// Writes min(keep, n_tokens) positions. Returns KVB_NUMERIC and sets *nan_at if a score is NaN.
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

// ---- Growing caches that are cut again, and where sequences of rows begin ----
//
// A head that was cut before holds rows whose tokens ascend. Its sinks are the rows of the first positions and its
// window those of the last, so choosing among rows is kvb_select() with both counted in rows.

// Finds the first of n ascending places that is at least `from`. Returns n if there is none.
static uint32_t first_at_least(const uint32_t *places, uint32_t n, uint32_t from)
{
    uint32_t low = 0, high = n;
    while (low < high) {
        uint32_t half = low + (high - low) / 2;
        if (places[half] < from) low = half + 1;
        else high = half;
    }
    return low;
}

static kvb_status check_places(const uint32_t *places, uint32_t n_rows, uint32_t n_tokens, kvb_error *err)
{
    for (uint32_t i = 0; i < n_rows; i++) {
        if (places[i] >= n_tokens)
            return kvb_fail(err, KVB_ARGUMENT, "kvb_reselect: places[%u]: expected a position below %u, found %u",
                            (unsigned)i, (unsigned)n_tokens, (unsigned)places[i]);
        if (i > 0 && places[i] <= places[i - 1])
            return kvb_fail(err, KVB_ARGUMENT,
                            "kvb_reselect: places[%u]: expected more than the %u before it, found %u", (unsigned)i,
                            (unsigned)places[i - 1], (unsigned)places[i]);
    }
    return KVB_OK;
}

kvb_status kvb_reselect(const float *scores, const uint32_t *places, uint32_t n_rows, uint32_t n_tokens, uint32_t keep,
                        uint32_t sink, uint32_t window, uint32_t *rows, size_t cap, kvb_error *err)
{
    if (!scores || !places || !rows)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_reselect: scores, places and rows must not be NULL");
    kvb_status status = check_places(places, n_rows, n_tokens, err);
    if (status != KVB_OK) return status;
    uint32_t window_from = window < n_tokens ? n_tokens - window : 0;
    uint32_t sink_rows = first_at_least(places, n_rows, sink);
    uint32_t window_rows = n_rows - first_at_least(places, n_rows, window_from);
    return kvb_select(scores, n_rows, keep, sink_rows, window_rows, rows, cap, err);
}

kvb_status kvb_reselect_all(const float *scores, const uint32_t *places, size_t n_heads, const size_t *old_offsets,
                            uint32_t n_tokens, const uint32_t *keep, uint32_t sink, uint32_t window, size_t *offsets,
                            uint32_t *rows, size_t cap, kvb_error *err)
{
    if (!scores || !places || !old_offsets || !keep || !offsets || !rows)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_reselect_all: no argument but err may be NULL");
    offsets[0] = 0;
    for (size_t h = 0; h < n_heads; h++) {
        size_t first = old_offsets[h], end = old_offsets[h + 1];
        if (end < first || end - first > n_tokens)
            return kvb_fail(err, KVB_ARGUMENT,
                            "kvb_reselect_all: old_offsets[%zu]: expected at least %zu and at most %u more, found %zu",
                            h + 1, first, (unsigned)n_tokens, end);
        uint32_t n_rows = (uint32_t)(end - first), kept = keep[h] < n_rows ? keep[h] : n_rows;
        kvb_error inner = {KVB_OK, ""};
        kvb_status status = kvb_reselect(scores + first, places + first, n_rows, n_tokens, kept, sink, window,
                                         rows + offsets[h], cap - offsets[h], &inner);
        if (status != KVB_OK) return kvb_fail(err, status, "head %zu: %s", h, inner.message);
        offsets[h + 1] = offsets[h] + kept;
    }
    return KVB_OK;
}

kvb_status kvb_cu_seqlens(const uint32_t *lengths, size_t n, uint32_t slack, uint32_t block, int32_t *cu, size_t cap,
                          kvb_error *err)
{
    if (!lengths || !cu) return kvb_fail(err, KVB_ARGUMENT, "kvb_cu_seqlens: lengths and cu must not be NULL");
    if (cap <= n)
        return kvb_fail(err, KVB_CAPACITY, "kvb_cu_seqlens: cu: expected room for one more than %zu, found %zu", n,
                        cap);
    uint64_t end = 0, unit = block ? block : 1;
    cu[0] = 0;
    for (size_t i = 0; i < n; i++) {
        end += ((uint64_t)lengths[i] + slack + unit - 1) / unit;
        if (end > INT32_MAX)
            return kvb_fail(err, KVB_UNSUPPORTED,
                            "kvb_cu_seqlens: the first %zu sequences take over %ld %s, more than int32 can count; "
                            "make the batch smaller",
                            i + 1, (long)INT32_MAX, unit > 1 ? "blocks" : "rows");
        cu[i + 1] = (int32_t)end;
    }
    return KVB_OK;
}
