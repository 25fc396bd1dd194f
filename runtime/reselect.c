// Caches that grow and are cut again, and where their rows lie behind one another.
//
// A head that was cut once holds rows whose tokens ascend. Of these the sinks are the rows of the first positions and
// the window those of the last, so the choice among rows is kvb_select() with the numbers of both counted in rows.
#include "fail.h"
#include "kvbudget.h"

// The first of n ascending places that is `from` or more; n when there is none.
static uint32_t first_at_least(const uint32_t *places, uint32_t n, uint32_t from)
{
    uint32_t low = 0, high = n;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (places[middle] < from) low = middle + 1;
        else high = middle;
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
