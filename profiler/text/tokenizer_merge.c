// One word to ids: its bytes or characters, merged pair by pair.
//
// Merging takes, again and again, the pair of neighbours with the lowest rank, of equal ranks the leftmost. A search
// over all pairs each time would be quadratic in the word, and a word may be a megabyte long (a run of letters or of
// punctuation, or, with SentencePiece's kind, the whole text), so the pairs wait in a binary heap: O(n log n). Pairs
// that a merge made invalid stay in the heap and are recognised when they come up.
#include "profiler/text/tokenizer_parts.h"
#include "profiler/text/utf8.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

typedef struct symbol {
    uint32_t id;             // NONE once it has been merged into its left neighbour
    uint32_t previous, next; // positions of the neighbours, or NONE
} symbol;

typedef struct candidate {
    uint64_t order;  // rank << 32 | position of the left symbol
    uint32_t result; // the token that the pair made; stale when the symbols there make another one, or none, by now
} candidate;

struct word_merger {
    const tokenizer *t;
    kvb_error *err;
    int32_t *ids;
    size_t n_ids, ids_room;
    symbol *symbols; // of one word
    uint32_t n;      // of them
    candidate *heap;
    size_t word_room; // symbols that fit; the heap has three times as many
    size_t heap_size;
    char *characters; // the word in the byte alphabet, for ignore_merges; twice word_room
};

static kvb_status no_memory(const word_merger *w)
{
    return kvb_fail(w->err, KVB_MEMORY, "not enough memory to encode the text");
}

kvb_status word_merger_open(word_merger **out, const tokenizer *t, size_t ids_room, kvb_error *err)
{
    word_merger *w = *out = calloc(1, sizeof *w);
    if (!w) return kvb_fail(err, KVB_MEMORY, "not enough memory to encode the text");
    *w = (word_merger){.t = t, .err = err, .ids_room = ids_room};
    w->ids = malloc(ids_room * sizeof *w->ids);
    return w->ids ? KVB_OK : no_memory(w);
}

void word_merger_close(word_merger *w)
{
    if (!w) return;
    free(w->ids);
    free(w->symbols);
    free(w->heap);
    free(w->characters);
    free(w);
}

int32_t *word_merger_take(word_merger *w, size_t *n)
{
    int32_t *ids = w->ids;
    *n = w->n_ids;
    w->ids = NULL;
    return ids;
}

kvb_status word_merger_put(word_merger *w, uint32_t id)
{
    if (w->n_ids == w->ids_room) {
        size_t room = w->ids_room * 2;
        int32_t *grown = realloc(w->ids, room * sizeof *grown);
        if (!grown) return no_memory(w);
        w->ids = grown;
        w->ids_room = room;
    }
    w->ids[w->n_ids++] = (int32_t)id;
    return KVB_OK;
}

static kvb_status reserve_word(word_merger *w, size_t size)
{
    if (size <= w->word_room) return KVB_OK;
    size_t room = size < 256 ? 256 : size + size / 2;
    free(w->symbols);
    free(w->heap);
    free(w->characters);
    // Each of the n-1 first pairs is one candidate, and each of the at most n-1 merges adds at most two.
    w->symbols = malloc(room * sizeof *w->symbols);
    w->heap = malloc(3 * room * sizeof *w->heap);
    w->characters = malloc(2 * room);
    w->word_room = w->symbols && w->heap && w->characters ? room : 0;
    return w->word_room ? KVB_OK : no_memory(w);
}

static void heap_push(word_merger *w, candidate c)
{
    size_t i = w->heap_size++;
    for (size_t parent; i > 0 && w->heap[parent = (i - 1) / 2].order > c.order; i = parent)
        w->heap[i] = w->heap[parent];
    w->heap[i] = c;
}

static candidate heap_pop(word_merger *w)
{
    candidate top = w->heap[0], last = w->heap[--w->heap_size];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < w->heap_size; i = child) {
        if (child + 1 < w->heap_size && w->heap[child + 1].order < w->heap[child].order) child++;
        if (w->heap[child].order >= last.order) break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = last;
    return top;
}

static void push_pair(word_merger *w, uint32_t left)
{
    uint32_t right = left == NONE ? NONE : w->symbols[left].next;
    if (right == NONE) return;
    const merge *m = vocabulary_merge(&w->t->v, w->symbols[left].id, w->symbols[right].id);
    if (m) heap_push(w, (candidate){(uint64_t)m->rank << 32 | left, m->result});
}

static void put_symbol(word_merger *w, int32_t id)
{
    // In front of the first stands NONE, which is 0 - 1.
    w->symbols[w->n] = (symbol){(uint32_t)id, w->n - 1, w->n + 1};
    w->n++;
}

// Something without a token becomes the unknown token, one for a run of them where they are fused; without an unknown
// token it vanishes.
static void put_unknown(word_merger *w, bool *in_unknown)
{
    if (w->t->unknown >= 0 && !(*in_unknown && w->t->fuse_unknown)) put_symbol(w, w->t->unknown);
    *in_unknown = true;
}

static void split_bytes(word_merger *w, const unsigned char *word, size_t size)
{
    bool in_unknown = false;
    for (size_t i = 0; i < size; i++) {
        int32_t id = w->t->byte_id[word[i]];
        if (id < 0) {
            put_unknown(w, &in_unknown);
        } else {
            put_symbol(w, id);
            in_unknown = false;
        }
    }
}

static bool put_bytes(word_merger *w, const unsigned char *p, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (w->t->byte_id[p[i]] < 0) return false;
    for (size_t i = 0; i < size; i++) put_symbol(w, w->t->byte_id[p[i]]);
    return true;
}

static void split_characters(word_merger *w, const unsigned char *word, size_t size)
{
    bool in_unknown = false, valid;
    for (size_t at = 0, step; at < size; at += step) {
        step = utf8_step(word + at, size - at, &valid);
        int64_t id = vocabulary_find(&w->t->v, (const char *)word + at, step);
        if (id >= 0) put_symbol(w, (int32_t)id);
        if (id >= 0 || (w->t->byte_fallback && put_bytes(w, word + at, step))) in_unknown = false;
        else put_unknown(w, &in_unknown);
    }
}

static void merge_symbols(word_merger *w)
{
    w->heap_size = 0;
    for (uint32_t i = 0; i < w->n; i++) push_pair(w, i);
    while (w->heap_size) {
        candidate c = heap_pop(w);
        symbol *left = &w->symbols[(uint32_t)c.order];
        if (left->id == NONE || left->next == NONE) continue;
        symbol *right = &w->symbols[left->next];
        const merge *m = vocabulary_merge(&w->t->v, left->id, right->id);
        if (!m || m->result != c.result) continue;
        left->id = m->result;
        left->next = right->next;
        right->id = NONE;
        if (left->next != NONE) w->symbols[left->next].previous = (uint32_t)c.order;
        push_pair(w, left->previous);
        push_pair(w, (uint32_t)c.order);
    }
}

static int64_t find_whole(word_merger *w, const char *word, size_t size)
{
    if (!w->t->byte_level) return vocabulary_find(&w->t->v, word, size);
    size_t n = 0;
    for (size_t i = 0; i < size; i++) n += put_char(w->characters + n, byte_to_char((unsigned char)word[i]));
    return vocabulary_find(&w->t->v, w->characters, n);
}

kvb_status word_merger_word(word_merger *w, const char *word, size_t size)
{
    kvb_status status = reserve_word(w, size);
    if (status != KVB_OK) return status;
    int64_t whole = w->t->ignore_merges ? find_whole(w, word, size) : -1;
    if (whole >= 0) return word_merger_put(w, (uint32_t)whole);
    w->n = 0;
    if (w->t->byte_level) split_bytes(w, (const unsigned char *)word, size);
    else split_characters(w, (const unsigned char *)word, size);
    if (w->n) w->symbols[w->n - 1].next = NONE;
    merge_symbols(w);
    for (uint32_t i = w->n ? 0 : NONE; i != NONE && status == KVB_OK; i = w->symbols[i].next)
        status = word_merger_put(w, w->symbols[i].id);
    return status;
}
