// A KV cache in which every head has its own length: one flat array of keys, one of values, and the offset at which
// each head's room begins.
// A head's entries are ordered by position. Positions are those in the text, so keys keep the rotation with which they
// were cached, whatever was evicted before them. Heads are counted layer-major: head (l, g) of [L, G] is l * G + g.
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
    const struct kv_cache *base; // a cache whose entries come before its own; borrowed and never changed; NULL: none
    uint8_t *formats;            // [L*G, 2] how keys and values are packed (kvb_packing); NULL: not packed
    unsigned char *packed;       // replaces k and v: head h's keys begin at packed_at[2 h], its values at [2 h + 1]
    size_t *packed_at;           // [2 L*G + 1] bytes
} kv_cache;

// One head's entries, inside the cache.
typedef struct kv_span {
    float *k, *v;        // [count, d]; NULL in a packed cache
    uint32_t *positions; // [count], ascending
    uint32_t count;
} kv_span;

// Which tokens of a context every head keeps, and how they are stored. Head h keeps positions[offsets[h]] ..
// positions[offsets[h + 1] - 1], ascending.
typedef struct kept_set {
    uint32_t n_heads;
    size_t *offsets; // [n_heads + 1]
    uint32_t *positions;
    uint8_t *formats; // [n_heads, 2] kvb_packing of keys and values; NULL: as floats
} kept_set;

// Opens an empty cache with room for room[h] entries of each of the L*G heads. The caller closes every cache.
kv_cache *kv_cache_open(uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, const uint32_t *room);
void kv_cache_close(kv_cache *c); // NULL is allowed
// Returns a copy with room for `extra` more entries in every head. The cache must not have a base or be packed.
kv_cache *kv_cache_fork(const kv_cache *c, uint32_t extra);

// Opens an empty cache that continues `base`, with room for `room` entries in every head: new entries are appended
// to it, and attention sees both. This is how many questions share one context. `base` must not have a base itself, and
// must outlive the new cache without being changed.
kv_cache *kv_cache_extend(const kv_cache *base, uint32_t room);

// Opens the cache of a context of n_tokens: copies the keys and values, of k and v [L, G, T, d], that `kept` lists
// (NULL: all), and leaves room for `extra` entries in every head. The next token has position n_tokens.
kv_cache *kv_cache_gather(uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim, const float *k, const float *v,
                          uint32_t n_tokens, const kept_set *kept, uint32_t extra);

// Does the same with an existing cache without a base, whose memory is reused if large enough: for many cuts in turn.
void kv_cache_refill(kv_cache *c, const float *k, const float *v, uint32_t n_tokens, const kept_set *kept,
                     uint32_t extra);

// Packs a cache without a base as `formats` [L*G, 2] says, and frees the floats. It can then only be extended, read by
// kv_cache_unpack, and closed. Fails with KVB_NUMERIC if a number that becomes an integer is not finite.
kvb_status kv_cache_pack(kv_cache *c, const uint8_t *formats, kvb_error *err);
// Rounds the floats of a cache without a base to what packing and unpacking would return. Fails as kv_cache_pack().
kvb_status kv_cache_round(kv_cache *c, const uint8_t *formats, kvb_error *err);
// Unpacks one head of a packed cache into `rows` [2, count, d], and returns it as a span.
kv_span kv_cache_unpack(const kv_cache *c, uint32_t layer, uint32_t kv_head, float *rows);

kv_span kv_cache_span(const kv_cache *c, uint32_t layer, uint32_t kv_head);      // its own entries
kv_span kv_cache_base_span(const kv_cache *c, uint32_t layer, uint32_t kv_head); // its base's; zero without one
// Returns the number of free entries of the fullest head.
uint32_t kv_cache_room(const kv_cache *c);
// Appends one entry; the head must have room.
void kv_cache_append(kv_cache *c, uint32_t layer, uint32_t kv_head, const float *k, const float *v, uint32_t position);
// Keeps the listed entries (ascending indices) of a head and removes all others. Their memory is not freed until
// kv_cache_compact.
void kv_cache_keep(kv_cache *c, uint32_t layer, uint32_t kv_head, const uint32_t *indices, uint32_t n);
// Moves everything into arrays of exactly the entries in use plus `extra` per head, and frees the old arrays.
void kv_cache_compact(kv_cache *c, uint32_t extra);

// The following functions count the cache's own entries, without its base.
uint64_t kv_cache_entries(const kv_cache *c); // in use, over all heads
// Return the bytes of keys and values in use, and all bytes that the cache has allocated, including positions and
// offsets, which depend only on this cache.
uint64_t kv_cache_bytes(const kv_cache *c);
uint64_t kv_cache_allocated(const kv_cache *c);

// Allocates room for n_positions kept positions of n_heads heads.
kept_set kept_set_open(uint32_t n_heads, size_t n_positions);
void kept_set_free(kept_set *kept); // a zero struct is allowed; leaves it zero
