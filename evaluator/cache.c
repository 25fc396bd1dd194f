#include "evaluator/cache.h"
#include "runtime/fail.h"
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

static size_t n_heads(const kv_cache *c)
{
    return (size_t)c->n_layers * c->n_kv_heads;
}

static void free_arrays(kv_cache *c)
{
    free(c->k);
    free(c->v);
    free(c->positions);
    c->k = c->v = NULL;
    c->positions = NULL;
    c->capacity = 0;
}

// Takes the arrays for c->offsets, which are set already, or keeps those that are there and large enough.
static kvb_status take_arrays(kv_cache *c, kvb_error *err)
{
    size_t entries = c->offsets[n_heads(c)], floats, bytes;
    if (c->k && entries <= c->capacity) return KVB_OK;
    if (__builtin_mul_overflow(entries, (size_t)c->head_dim, &floats) ||
        __builtin_mul_overflow(floats, sizeof(float), &bytes))
        return kvb_fail(err, KVB_MEMORY, "KV cache: %zu entries of %u floats do not fit into memory", entries,
                        c->head_dim);
    free_arrays(c);
    c->k = malloc(bytes + 1);
    c->v = malloc(bytes + 1);
    c->positions = malloc(entries * sizeof *c->positions + 1);
    c->capacity = entries;
    if (c->k && c->v && c->positions) return KVB_OK;
    free_arrays(c);
    return kvb_fail(err, KVB_MEMORY, "KV cache: no memory for %zu entries, %zu MiB", entries, 2 * (bytes >> 20));
}

// Without entries or room for any.
static kv_cache *open_bare(uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, kvb_error *err)
{
    kv_cache *c = calloc(1, sizeof *c);
    size_t heads = (size_t)n_layers * n_kv_heads;
    if (c) *c = (kv_cache){.n_layers = n_layers, .n_kv_heads = n_kv_heads, .head_dim = head_dim};
    if (c) c->offsets = calloc(heads + 1, sizeof *c->offsets);
    if (c) c->counts = calloc(heads + 1, sizeof *c->counts);
    if (c && c->offsets && c->counts) return c;
    kv_cache_close(c);
    kvb_fail(err, KVB_MEMORY, "KV cache: no memory for %zu heads", heads);
    return NULL;
}

kvb_status kv_cache_open(kv_cache **out, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim,
                         const uint32_t *room, kvb_error *err)
{
    kv_cache *c = *out = open_bare(n_layers, n_kv_heads, head_dim, err);
    if (!c) return KVB_MEMORY;
    for (size_t h = 0; h < n_heads(c); h++) c->offsets[h + 1] = c->offsets[h] + room[h];
    kvb_status status = take_arrays(c, err);
    if (status == KVB_OK) return KVB_OK;
    kv_cache_close(c);
    *out = NULL;
    return status;
}

void kv_cache_close(kv_cache *c)
{
    if (!c) return;
    free_arrays(c);
    free(c->offsets);
    free(c->counts);
    free(c);
}

kv_span kv_cache_span(const kv_cache *c, uint32_t layer, uint32_t kv_head)
{
    size_t h = (size_t)layer * c->n_kv_heads + kv_head, at = c->offsets[h];
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

kvb_status kv_cache_fork(kv_cache **out, const kv_cache *c, uint32_t extra, kvb_error *err)
{
    size_t heads = n_heads(c);
    uint32_t *room = malloc(heads * sizeof *room + 1);
    *out = NULL;
    if (!room) return kvb_fail(err, KVB_MEMORY, "KV cache: no memory for %zu heads", heads);
    for (size_t h = 0; h < heads; h++) room[h] = c->counts[h] + extra;
    kvb_status status = kv_cache_open(out, c->n_layers, c->n_kv_heads, c->head_dim, room, err);
    free(room);
    if (status == KVB_OK) copy_entries(*out, c);
    return status;
}

kvb_status kv_cache_extend(kv_cache **out, const kv_cache *base, uint32_t room, kvb_error *err)
{
    size_t heads = n_heads(base);
    uint32_t *rooms = malloc(heads * sizeof *rooms + 1);
    *out = NULL;
    if (!rooms) return kvb_fail(err, KVB_MEMORY, "KV cache: no memory for %zu heads", heads);
    for (size_t h = 0; h < heads; h++) rooms[h] = room;
    kvb_status status = kv_cache_open(out, base->n_layers, base->n_kv_heads, base->head_dim, rooms, err);
    free(rooms);
    if (status != KVB_OK) return status;
    (*out)->base = base;
    (*out)->next_position = base->next_position;
    return KVB_OK;
}

kvb_status kv_cache_compact(kv_cache *c, uint32_t extra, kvb_error *err)
{
    kv_cache *smaller;
    kvb_status status = kv_cache_fork(&smaller, c, extra, err);
    if (status != KVB_OK) return status;
    kv_cache old = *c;
    *c = *smaller;
    *smaller = old;
    kv_cache_close(smaller);
    return KVB_OK;
}

kvb_status kv_cache_gather(kv_cache **out, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, const float *k,
                           const float *v, uint32_t n_tokens, const kept_set *kept, uint32_t extra, kvb_error *err)
{
    kv_cache *c = *out = open_bare(n_layers, n_kv_heads, head_dim, err);
    if (!c) return KVB_MEMORY;
    kvb_status status = kv_cache_refill(c, k, v, n_tokens, kept, extra, err);
    if (status == KVB_OK) return KVB_OK;
    kv_cache_close(c);
    *out = NULL;
    return status;
}

kvb_status kv_cache_refill(kv_cache *c, const float *k, const float *v, uint32_t n_tokens, const kept_set *kept,
                           uint32_t extra, kvb_error *err)
{
    size_t heads = n_heads(c), d = c->head_dim;
    for (size_t h = 0; h < heads; h++) {
        size_t n = kept ? kept->offsets[h + 1] - kept->offsets[h] : n_tokens;
        c->offsets[h + 1] = c->offsets[h] + n + extra;
    }
    memset(c->counts, 0, heads * sizeof *c->counts);
    kvb_status status = take_arrays(c, err);
    if (status != KVB_OK) return status;
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
    return KVB_OK;
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

void kv_cache_evict(kv_cache *c, uint32_t layer, uint32_t kv_head, uint32_t index)
{
    kv_span s = kv_cache_span(c, layer, kv_head);
    size_t d = c->head_dim, behind = s.count - index - 1;
    memmove(s.k + index * d, s.k + (index + 1) * d, behind * d * sizeof(float));
    memmove(s.v + index * d, s.v + (index + 1) * d, behind * d * sizeof(float));
    memmove(s.positions + index, s.positions + index + 1, behind * sizeof *s.positions);
    c->counts[(size_t)layer * c->n_kv_heads + kv_head]--;
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

void kv_cache_drop_last(kv_cache *c, uint32_t layer, uint32_t n)
{
    for (uint32_t g = 0; g < c->n_kv_heads; g++) c->counts[(size_t)layer * c->n_kv_heads + g] -= n;
}

uint64_t kv_cache_entries(const kv_cache *c)
{
    uint64_t sum = 0;
    for (size_t h = 0; h < n_heads(c); h++) sum += c->counts[h];
    return sum;
}

uint64_t kv_cache_bytes(const kv_cache *c)
{
    return kv_cache_entries(c) * 2 * c->head_dim * sizeof(float);
}

uint64_t kv_cache_allocated(const kv_cache *c)
{
    return malloc_usable_size(c->k) + malloc_usable_size(c->v) + malloc_usable_size(c->positions) +
           malloc_usable_size(c->offsets) + malloc_usable_size(c->counts) + sizeof *c;
}

kvb_status kept_set_open(kept_set *out, uint32_t n, size_t n_positions, kvb_error *err)
{
    *out = (kept_set){n, calloc((size_t)n + 1, sizeof *out->offsets), calloc(n_positions + 1, sizeof *out->positions)};
    if (out->offsets && out->positions) return KVB_OK;
    kept_set_free(out);
    return kvb_fail(err, KVB_MEMORY, "no memory for %zu kept positions of %u heads", n_positions, n);
}

void kept_set_free(kept_set *kept)
{
    free(kept->offsets);
    free(kept->positions);
    *kept = (kept_set){0};
}
