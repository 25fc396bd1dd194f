// The vocabulary: token texts by id, ids by text, and the merges by the pair of ids that they join.
#include "profiler/tokenizer_parts.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// FNV-1a, then a last mix, because the tables take the low bits.
static uint32_t text_hash(const char *text, size_t size)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < size; i++) h = (h ^ (unsigned char)text[i]) * 0x100000001b3u;
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

static bool token_is(const vocabulary *v, uint32_t id, const char *text, size_t size)
{
    return v->start[id + 1] - v->start[id] == size && memcmp(v->text + v->start[id], text, size) == 0;
}

// The slot that holds the text, or the empty one where it belongs.
static uint32_t text_slot(const vocabulary *v, const char *text, size_t size)
{
    uint32_t slot = text_hash(text, size) & v->slot_mask;
    while (v->slots[slot] && !token_is(v, v->slots[slot] - 1, text, size)) slot = (slot + 1) & v->slot_mask;
    return slot;
}

int64_t vocabulary_find(const vocabulary *v, const char *text, size_t size)
{
    return (int64_t)v->slots[text_slot(v, text, size)] - 1;
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

kvb_status vocabulary_begin(vocabulary *v, const char *name, const gguf_array *tokens, const gguf_array *types,
                            kvb_error *err)
{
    if (tokens->count == 0 || tokens->count >= INT32_MAX || !table_mask(tokens->count, &v->slot_mask) ||
        tokens->size > UINT32_MAX)
        return kvb_fail(
            err, KVB_FORMAT,
            "%s: tokenizer.ggml.tokens: expected 1 to 2^30 tokens of at most 4 GiB, found %llu; the file is damaged",
            name, (unsigned long long)tokens->count);
    if (types && types->count != tokens->count)
        return kvb_fail(
            err, KVB_FORMAT,
            "%s: tokenizer.ggml.token_type: expected as many as tokens, %llu, found %llu; the file is damaged", name,
            (unsigned long long)tokens->count, (unsigned long long)types->count);
    uint32_t n = v->size = (uint32_t)tokens->count;
    v->text = malloc(tokens->size); // a little more than needed: the strings' lengths are counted as well
    v->start = calloc(n + (size_t)1, sizeof *v->start);
    v->type = calloc(n, sizeof *v->type);
    v->slots = calloc(v->slot_mask + (size_t)1, sizeof *v->slots);
    if (!v->text || !v->start || !v->type || !v->slots)
        return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for a vocabulary of %u tokens", name, n);

    gguf_array rest = *tokens;
    gguf_string s;
    for (uint32_t id = 0; gguf_next_string(&rest, &s); id++) {
        memcpy(v->text + v->start[id], s.data, s.size);
        v->start[id + 1] = v->start[id] + (uint32_t)s.size;
        int64_t type = types ? gguf_array_int(types, id) : TOKEN_NORMAL;
        if (type < 0 || type > UINT8_MAX)
            return kvb_fail(
                err, KVB_FORMAT,
                "%s: tokenizer.ggml.token_type: expected a small number for token %u, found %lld; the file is damaged",
                name, id, (long long)type);
        v->type[id] = (uint8_t)type;
        v->slots[text_slot(v, s.data, s.size)] = id + 1;
    }
    return KVB_OK;
}

// "left right": the separator is the first space that is not the first byte. `joined` has room for the whole string.
static kvb_status add_merge(vocabulary *v, const char *name, gguf_string s, uint32_t rank, char *joined, kvb_error *err)
{
    const char *space = s.size > 1 ? memchr(s.data + 1, ' ', s.size - 1) : NULL;
    int64_t left = -1, right = -1, result = -1;
    if (space) {
        size_t before = (size_t)(space - s.data), after = s.size - before - 1;
        memcpy(joined, s.data, before);
        memcpy(joined + before, space + 1, after);
        left = vocabulary_find(v, joined, before);
        right = vocabulary_find(v, joined + before, after);
        result = vocabulary_find(v, joined, before + after);
    }
    if (left < 0 || right < 0 || result < 0)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: tokenizer.ggml.merges: expected two tokens that make a third in entry %u, found '%.*s'; "
                        "the file is damaged",
                        name, rank, (int)(s.size < 60 ? s.size : 60), s.data);
    v->merges[merge_slot(v, (uint32_t)left, (uint32_t)right)] =
        (merge){(uint32_t)left, (uint32_t)right, rank, (uint32_t)result};
    return KVB_OK;
}

kvb_status vocabulary_add_merges(vocabulary *v, const char *name, const gguf_array *merges, kvb_error *err)
{
    if (!table_mask(merges->count, &v->merge_mask))
        return kvb_fail(err, KVB_FORMAT,
                        "%s: tokenizer.ggml.merges: expected fewer than 2^30, found %llu; the file is damaged", name,
                        (unsigned long long)merges->count);
    char *joined = malloc(merges->size + 1);
    v->merges = malloc((v->merge_mask + (size_t)1) * sizeof *v->merges);
    kvb_status status = KVB_OK;
    if (joined && v->merges) {
        for (size_t i = 0; i <= v->merge_mask; i++) v->merges[i].left = UINT32_MAX;
        gguf_array rest = *merges;
        gguf_string s;
        for (uint32_t rank = 0; status == KVB_OK && gguf_next_string(&rest, &s); rank++)
            status = add_merge(v, name, s, rank, joined, err);
    } else {
        status =
            kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %llu merges", name, (unsigned long long)merges->count);
    }
    free(joined);
    return status;
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
