// A KV cache in which every head has its own length: one flat array of keys and one of values, and where each head's
// room begins.
//
// Entries of a head stand by ascending position. Positions are those of the text, so keys keep the rotation that they
// were cached with, whatever was evicted before them. Heads are counted layer-major: head (l, g) of [L, G] is l * G +
// g.
#pragma once
#include "runtime/kvbudget.h"
#include <stddef.h>
#include <stdint.h>

typedef struct kv_cache {
    uint32_t n_layers, n_kv_heads, head_dim; // L, G, d
    uint32_t next_position;                  // of the token that is appended next
    size_t *offsets;                         // [L*G + 1] entries: head h owns offsets[h] .. offsets[h + 1] - 1
    uint32_t *counts;                        // [L*G] entries in use, from the front of the head's room
    float *k, *v;                            // [offsets[L*G], d]
    uint32_t *positions;                     // [offsets[L*G]]
    size_t capacity;                         // entries that these three have memory for
    const struct kv_cache *base; // entries that stand before its own, borrowed and never changed; NULL: none
} kv_cache;

// One head's entries, inside the cache.
typedef struct kv_span {
    float *k, *v;        // [count, d]
    uint32_t *positions; // [count], ascending
    uint32_t count;
} kv_span;

// Which tokens of a context stay, per head: head h keeps positions[offsets[h]] .. positions[offsets[h + 1] - 1],
// ascending.
typedef struct kept_set {
    uint32_t n_heads;
    size_t *offsets; // [n_heads + 1]
    uint32_t *positions;
} kept_set;

// An empty cache with room for room[h] entries of each of the L*G heads. The caller closes it, as all of these.
kv_cache *kv_cache_open(uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, const uint32_t *room);
void kv_cache_close(kv_cache *c); // NULL is allowed
// A copy with room for `extra` entries more in every head. The cache must stand by itself (no base).
kv_cache *kv_cache_fork(const kv_cache *c, uint32_t extra);

// An empty cache behind `base`, with room for `room` entries in every head: what is appended goes there, and attention
// sees both. Many questions share one context so. `base` stands by itself, outlives the new cache, and does not change
// while that lives.
kv_cache *kv_cache_extend(const kv_cache *base, uint32_t room);

// The cache of a context of n_tokens: of keys and values [L, G, T, d] it copies what `kept` lists (NULL: everything)
// and leaves room for `extra` entries in every head. The next token stands at position n_tokens.
kv_cache *kv_cache_gather(uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, const float *k, const float *v,
                          uint32_t n_tokens, const kept_set *kept, uint32_t extra);

// The same into a cache that is there already and stands by itself, in the memory that it has where that is enough: for
// many cuts one after the other.
void kv_cache_refill(kv_cache *c, const float *k, const float *v, uint32_t n_tokens, const kept_set *kept,
                     uint32_t extra);

kv_span kv_cache_span(const kv_cache *c, uint32_t layer, uint32_t kv_head);      // its own
kv_span kv_cache_base_span(const kv_cache *c, uint32_t layer, uint32_t kv_head); // of its base; zero without one
// Free entries of the fullest head.
uint32_t kv_cache_room(const kv_cache *c);
// Appends one entry; the head must have room.
void kv_cache_append(kv_cache *c, uint32_t layer, uint32_t kv_head, const float *k, const float *v, uint32_t position);
// Keeps the listed entries (ascending indices) and removes all others of the head, whose memory stays with it until
// kv_cache_compact.
void kv_cache_keep(kv_cache *c, uint32_t layer, uint32_t kv_head, const uint32_t *indices, uint32_t n);
// Moves everything into arrays of exactly the entries in use plus `extra` per head and gives the old ones back.
void kv_cache_compact(kv_cache *c, uint32_t extra);

// All of the following count what is the cache's own, without its base.
uint64_t kv_cache_entries(const kv_cache *c); // in use, over all heads
// Bytes of keys and values in use; and all bytes that the cache has asked for, positions and offsets included, which do
// not depend on what else has run.
uint64_t kv_cache_bytes(const kv_cache *c);
uint64_t kv_cache_allocated(const kv_cache *c);

// Room for n_positions kept positions of n_heads heads.
kept_set kept_set_open(uint32_t n_heads, size_t n_positions);
void kept_set_free(kept_set *kept); // a zero struct is allowed; leaves it zero
