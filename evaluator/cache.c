#include "evaluator/cache.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

static size_t n_heads(const kv_cache *c)
{
    return (size_t)c->n_layers * c->n_kv_heads;
}

static void free_arrays(kv_cache *c)
{
    free_all(c->k, c->v, c->positions, c->formats, c->packed, c->packed_at);
    c->k = c->v = NULL;
    c->positions = NULL;
    c->formats = c->packed = NULL;
    c->packed_at = NULL;
    c->capacity = 0;
}

// Allocates the arrays for c->offsets, which are set already, unless the present ones are large enough.
static void take_arrays(kv_cache *c)
{
    size_t entries = c->offsets[n_heads(c)];
    if (c->k && entries <= c->capacity) return;
    free_arrays(c);
    c->k = need_more(NULL, entries, c->head_dim * sizeof(float), "keys of a cache");
    c->v = need_more(NULL, entries, c->head_dim * sizeof(float), "values of a cache");
    c->positions = need_more(NULL, entries, sizeof *c->positions, "positions of a cache");
    c->capacity = entries;
}

// Makes a cache without entries or room for any.
static kv_cache *open_bare(uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim)
{
    kv_cache *c = need(1, sizeof *c, "caches");
    size_t heads = (size_t)n_layers * n_kv_heads;
    *c = (kv_cache){.n_layers = n_layers, .n_kv_heads = n_kv_heads, .head_dim = head_dim};
    c->offsets = need(heads + 1, sizeof *c->offsets, "heads");
    c->counts = need(heads, sizeof *c->counts, "heads");
    return c;
}

kv_cache *kv_cache_open(uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, const uint32_t *room)
{
    kv_cache *c = open_bare(n_layers, n_kv_heads, head_dim);
    for (size_t h = 0; h < n_heads(c); h++) c->offsets[h + 1] = c->offsets[h] + room[h];
    take_arrays(c);
    return c;
}

void kv_cache_close(kv_cache *c)
{
    if (!c) return;
    free_arrays(c);
    free_all(c->offsets, c->counts, c);
}

kv_span kv_cache_span(const kv_cache *c, uint32_t layer, uint32_t kv_head)
{
    size_t h = (size_t)layer * c->n_kv_heads + kv_head, at = c->offsets[h];
    if (c->packed) return (kv_span){NULL, NULL, c->positions + at, c->counts[h]};
    return (kv_span){c->k + at * c->head_dim, c->v + at * c->head_dim, c->positions + at, c->counts[h]};
}

kv_span kv_cache_base_span(const kv_cache *c, uint32_t layer, uint32_t kv_head)
{
    return c->base ? kv_cache_span(c->base, layer, kv_head) : (kv_span){0};
}

// Copies all entries of `from` to the front of each head's room in `to`.
static void copy_entries(kv_cache *to, const kv_cache *from)
{
    size_t d = from->head_dim;
    for (size_t h = 0; h < n_heads(from); h++) {
        size_t a = to->offsets[h], b = from->offsets[h], n = from->counts[h];
        memcpy(to->k + a * d, from->k + b * d, n * d * sizeof(float));
        memcpy(to->v + a * d, from->v + b * d, n * d * sizeof(float));
        memcpy(to->positions + a, from->positions + b, n * sizeof *to->positions);
        to->counts[h] = from->counts[h];
    }
    to->next_position = from->next_position;
}

kv_cache *kv_cache_fork(const kv_cache *c, uint32_t extra)
{
    size_t heads = n_heads(c);
    uint32_t *room = need(heads, sizeof *room, "heads");
    for (size_t h = 0; h < heads; h++) room[h] = c->counts[h] + extra;
    kv_cache *fork = kv_cache_open(c->n_layers, c->n_kv_heads, c->head_dim, room);
    free(room);
    copy_entries(fork, c);
    return fork;
}

kv_cache *kv_cache_extend(const kv_cache *base, uint32_t room)
{
    kv_cache *c = open_bare(base->n_layers, base->n_kv_heads, base->head_dim);
    for (size_t h = 0; h < n_heads(c); h++) c->offsets[h + 1] = c->offsets[h] + room;
    take_arrays(c);
    c->base = base;
    c->next_position = base->next_position;
    return c;
}

void kv_cache_compact(kv_cache *c, uint32_t extra)
{
    kv_cache *smaller = kv_cache_fork(c, extra), old = *c;
    *c = *smaller;
    *smaller = old;
    kv_cache_close(smaller);
}

kv_cache *kv_cache_gather(uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, const float *k, const float *v,
                          uint32_t n_tokens, const kept_set *kept, uint32_t extra)
{
    kv_cache *c = open_bare(n_layers, n_kv_heads, head_dim);
    kv_cache_refill(c, k, v, n_tokens, kept, extra);
    return c;
}

void kv_cache_refill(kv_cache *c, const float *k, const float *v, uint32_t n_tokens, const kept_set *kept,
                     uint32_t extra)
{
    size_t heads = n_heads(c), d = c->head_dim;
    for (size_t h = 0; h < heads; h++) {
        size_t n = kept ? kept->offsets[h + 1] - kept->offsets[h] : n_tokens;
        c->offsets[h + 1] = c->offsets[h] + n + extra;
    }
    memset(c->counts, 0, heads * sizeof *c->counts);
    take_arrays(c);
#pragma omp parallel for schedule(static)
    for (size_t h = 0; h < heads; h++) {
        uint32_t n = (uint32_t)(c->offsets[h + 1] - c->offsets[h]) - extra;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t j = kept ? kept->positions[kept->offsets[h] + i] : i;
            size_t to = c->offsets[h] + i, from = h * n_tokens + j;
            memcpy(c->k + to * d, k + from * d, d * sizeof(float));
            memcpy(c->v + to * d, v + from * d, d * sizeof(float));
            c->positions[to] = j;
        }
        c->counts[h] = n;
    }
    c->next_position = n_tokens;
}

static float *rows_of(kv_cache *c, size_t i)
{
    return (i % 2 ? c->v : c->k) + c->offsets[i / 2] * c->head_dim;
}

// Packs the keys (even i) or values (odd i) of head i / 2 into `to`.
static kvb_status pack_rows(kv_cache *c, size_t i, uint8_t format, void *to, kvb_error *err)
{
    kvb_error mine = {KVB_OK, ""};
    kvb_status status =
        kvb_pack(format, i % 2 ? KVB_VALUES : KVB_KEYS, rows_of(c, i), c->counts[i / 2], c->head_dim, to, &mine);
    if (status != KVB_OK)
#pragma omp critical
        kvb_fail(err, status, "layer %zu, KV head %zu: %s", i / 2 / c->n_kv_heads, i / 2 % c->n_kv_heads, mine.message);
    return status;
}

kvb_status kv_cache_round(kv_cache *c, const uint8_t *formats, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < 2 * n_heads(c) && status == KVB_OK; i++) {
        kvb_side side = i % 2 ? KVB_VALUES : KVB_KEYS;
        uint32_t n = c->counts[i / 2];
        void *packed = need(kvb_packed_bytes(formats[i], side, n, c->head_dim), 1, "bytes of a head");
        status = pack_rows(c, i, formats[i], packed, err);
        if (status == KVB_OK) status = kvb_unpack(formats[i], side, packed, n, c->head_dim, rows_of(c, i), err);
        free(packed);
    }
    return status;
}

kvb_status kv_cache_pack(kv_cache *c, const uint8_t *formats, kvb_error *err)
{
    size_t heads = n_heads(c), *at = need(2 * heads + 1, sizeof *at, "heads");
    for (size_t i = 0; i < 2 * heads; i++)
        at[i + 1] = at[i] + kvb_packed_bytes(formats[i], i % 2 ? KVB_VALUES : KVB_KEYS, c->counts[i / 2], c->head_dim);
    unsigned char *packed = need(at[2 * heads], 1, "bytes of a packed cache");
    kvb_status status = KVB_OK;
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t i = 0; i < 2 * heads; i++) {
        kvb_status one = pack_rows(c, i, formats[i], packed + at[i], err);
        if (one != KVB_OK)
#pragma omp atomic write
            status = one;
    }
    c->packed = packed;
    c->packed_at = at;
    c->formats = need_copy(formats, 2 * heads, 1, "formats");
    free_all(c->k, c->v);
    c->k = c->v = NULL;
    return status;
}

kv_span kv_cache_unpack(const kv_cache *c, uint32_t layer, uint32_t kv_head, float *rows)
{
    size_t h = (size_t)layer * c->n_kv_heads + kv_head;
    kv_span span = kv_cache_span(c, layer, kv_head);
    span.k = rows;
    span.v = rows + (size_t)span.count * c->head_dim;
    for (size_t i = 0; i < 2; i++) // cannot fail: the formats are those that it was packed in
        (void)kvb_unpack(c->formats[2 * h + i], i ? KVB_VALUES : KVB_KEYS, c->packed + c->packed_at[2 * h + i],
                         span.count, c->head_dim, i ? span.v : span.k, NULL);
    return span;
}

uint32_t kv_cache_room(const kv_cache *c)
{
    size_t least = SIZE_MAX;
    for (size_t h = 0; h < n_heads(c); h++) {
        size_t left = c->offsets[h + 1] - c->offsets[h] - c->counts[h];
        least = left < least ? left : least;
    }
    return least > UINT32_MAX ? UINT32_MAX : (uint32_t)least;
}

void kv_cache_append(kv_cache *c, uint32_t layer, uint32_t kv_head, const float *k, const float *v, uint32_t position)
{
    size_t h = (size_t)layer * c->n_kv_heads + kv_head, at = c->offsets[h] + c->counts[h]++, d = c->head_dim;
    memcpy(c->k + at * d, k, d * sizeof(float));
    memcpy(c->v + at * d, v, d * sizeof(float));
    c->positions[at] = position;
}

void kv_cache_keep(kv_cache *c, uint32_t layer, uint32_t kv_head, const uint32_t *indices, uint32_t n)
{
    kv_span s = kv_cache_span(c, layer, kv_head);
    size_t d = c->head_dim;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = indices[i]; // >= i, so nothing is overwritten before it has moved
        if (i == j) continue;
        memcpy(s.k + i * d, s.k + j * d, d * sizeof(float));
        memcpy(s.v + i * d, s.v + j * d, d * sizeof(float));
        s.positions[i] = s.positions[j];
    }
    c->counts[(size_t)layer * c->n_kv_heads + kv_head] = n;
}

uint64_t kv_cache_entries(const kv_cache *c)
{
    uint64_t sum = 0;
    for (size_t h = 0; h < n_heads(c); h++) sum += c->counts[h];
    return sum;
}

uint64_t kv_cache_bytes(const kv_cache *c)
{
    if (c->packed) return c->packed_at[2 * n_heads(c)];
    return kv_cache_entries(c) * 2 * c->head_dim * sizeof(float);
}

uint64_t kv_cache_allocated(const kv_cache *c)
{
    size_t heads = n_heads(c), entry = 2 * c->head_dim * sizeof *c->k + sizeof *c->positions;
    if (c->packed)
        return c->packed_at[2 * heads] + c->capacity * sizeof *c->positions + (heads + 1) * sizeof *c->offsets +
               heads * sizeof *c->counts + (2 * heads + 1) * sizeof *c->packed_at + 2 * heads + sizeof *c;
    return c->capacity * entry + (heads + 1) * sizeof *c->offsets + heads * sizeof *c->counts + sizeof *c;
}

kept_set kept_set_open(uint32_t n, size_t n_positions)
{
    return (kept_set){n, need((size_t)n + 1, sizeof(size_t), "heads"),
                      need(n_positions, sizeof(uint32_t), "kept positions"), NULL};
}

void kept_set_free(kept_set *kept)
{
    free_all(kept->offsets, kept->positions, kept->formats);
    *kept = (kept_set){0};
}
