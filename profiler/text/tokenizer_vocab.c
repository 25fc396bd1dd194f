// The vocabulary: token texts by id, ids by text, and the merges by the pair of ids that they join.
#include "profiler/text/tokenizer_parts.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// A text in two pieces, so that the result of a merge is found without putting it together.
typedef struct two_pieces {
    const char *front, *back;
    size_t front_size, back_size;
} two_pieces;

// FNV-1a, then a last mix, because the tables take the low bits.
static uint32_t text_hash(two_pieces t)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < t.front_size; i++) h = (h ^ (unsigned char)t.front[i]) * 0x100000001b3u;
    for (size_t i = 0; i < t.back_size; i++) h = (h ^ (unsigned char)t.back[i]) * 0x100000001b3u;
    return (uint32_t)(h ^ h >> 32);
}

static uint32_t pair_hash(uint32_t left, uint32_t right)
{
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> 32);
}

// Slots for n entries, at most half of them used: probing ends quickly, and always.
static bool table_mask(uint64_t n, uint32_t *mask)
{
    uint64_t slots = 16;
    while (slots < 2 * n) slots *= 2;
    *mask = (uint32_t)(slots - 1);
    return slots <= UINT32_MAX;
}

static bool token_is(const vocabulary *v, uint32_t id, two_pieces t)
{
    const char *text = v->text + v->start[id];
    return token_bytes(v, id) == t.front_size + t.back_size && memcmp(text, t.front, t.front_size) == 0 &&
           (!t.back_size || memcmp(text + t.front_size, t.back, t.back_size) == 0);
}

// The slot that holds the text, or the empty one where it belongs.
static uint32_t text_slot(const vocabulary *v, two_pieces t)
{
    uint32_t slot = text_hash(t) & v->slot_mask;
    while (v->slots[slot] && !token_is(v, v->slots[slot] - 1, t)) slot = (slot + 1) & v->slot_mask;
    return slot;
}

int64_t vocabulary_find(const vocabulary *v, const char *text, size_t size)
{
    return (int64_t)v->slots[text_slot(v, (two_pieces){text, NULL, size, 0})] - 1;
}

static uint32_t merge_slot(const vocabulary *v, uint32_t left, uint32_t right)
{
    uint32_t slot = pair_hash(left, right) & v->merge_mask;
    while (v->merges[slot].left != UINT32_MAX && (v->merges[slot].left != left || v->merges[slot].right != right))
        slot = (slot + 1) & v->merge_mask;
    return slot;
}

const merge *vocabulary_merge(const vocabulary *v, uint32_t left, uint32_t right)
{
    const merge *m = &v->merges[merge_slot(v, left, right)];
    return m->left == UINT32_MAX ? NULL : m;
}

kvb_status vocabulary_reserve(vocabulary *v, const char *name, uint64_t n, uint64_t bytes, kvb_error *err)
{
    if (n == 0 || n >= INT32_MAX || !table_mask(n, &v->slot_mask) || bytes > UINT32_MAX)
        return kvb_fail(
            err, KVB_FORMAT,
            "%s: the vocabulary: expected 1 to 2^30 tokens of at most 4 GiB, found %llu; the file is damaged", name,
            (unsigned long long)n);
    v->size = (uint32_t)n;
    v->text = malloc(bytes + 1);
    v->start = calloc(n + 1, sizeof *v->start);
    v->type = calloc(n, sizeof *v->type);
    v->slots = calloc(v->slot_mask + (size_t)1, sizeof *v->slots);
    if (!v->text || !v->start || !v->type || !v->slots)
        return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for a vocabulary of %u tokens", name, v->size);
    return KVB_OK;
}

void vocabulary_put(vocabulary *v, uint32_t id, const char *text, size_t size, uint8_t type)
{
    if (size) memcpy(v->text + v->start[id], text, size);
    v->start[id + 1] = v->start[id] + (uint32_t)size;
    v->type[id] = type;
    v->slots[text_slot(v, (two_pieces){text, NULL, size, 0})] = id + 1;
}

void vocabulary_skip(vocabulary *v, uint32_t id)
{
    v->start[id + 1] = v->start[id];
    v->type[id] = TOKEN_UNUSED;
}

kvb_status vocabulary_reserve_merges(vocabulary *v, const char *name, uint64_t n, kvb_error *err)
{
    if (!table_mask(n, &v->merge_mask))
        return kvb_fail(err, KVB_FORMAT, "%s: merges: expected fewer than 2^30, found %llu; the file is damaged", name,
                        (unsigned long long)n);
    v->merges = malloc((v->merge_mask + (size_t)1) * sizeof *v->merges);
    if (!v->merges)
        return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %llu merges", name, (unsigned long long)n);
    for (size_t i = 0; i <= v->merge_mask; i++) v->merges[i].left = UINT32_MAX;
    return KVB_OK;
}

bool vocabulary_put_merge(vocabulary *v, const char *left, size_t left_size, const char *right, size_t right_size,
                          uint32_t rank)
{
    int64_t l = vocabulary_find(v, left, left_size), r = vocabulary_find(v, right, right_size);
    two_pieces joined = {left, right, left_size, right_size};
    int64_t result = l < 0 || r < 0 ? -1 : (int64_t)v->slots[text_slot(v, joined)] - 1;
    if (result < 0) return false;
    v->merges[merge_slot(v, (uint32_t)l, (uint32_t)r)] = (merge){(uint32_t)l, (uint32_t)r, rank, (uint32_t)result};
    return true;
}

void vocabulary_free(vocabulary *v)
{
    free(v->text);
    free(v->start);
    free(v->type);
    free(v->slots);
    free(v->merges);
    *v = (vocabulary){0};
}
