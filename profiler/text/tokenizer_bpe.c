// Byte-pair encoding: the byte alphabet, the vocabulary (texts by id, ids by text, merges by the pair of ids that they
// join), and one word to ids, whose bytes or characters are merged pair by pair.
#include "formats/need.h"
#include "profiler/text/tokenizer_parts.h"
#include "profiler/text/utf8.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// ---- GPT-2's alphabet ----

// Printable bytes stand for themselves; the other 68 take the characters from U+0100 on, in order of their value.
static bool stands_for_itself(uint32_t byte)
{
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
}

uint32_t byte_to_char(uint8_t byte)
{
    if (stands_for_itself(byte)) return byte;
    if (byte <= 32) return 256u + byte;
    if (byte <= 160) return 256u + 33 + (byte - 127u);
    return 256u + 33 + 34; // 173
}

int char_to_byte(uint32_t character)
{
    if (character < 256) return stands_for_itself(character) ? (int)character : -1;
    uint32_t n = character - 256;
    if (n <= 32) return (int)n;
    if (n < 33 + 34) return (int)(n - 33 + 127);
    return n == 33 + 34 ? 173 : -1;
}

size_t put_char(char *out, uint32_t character)
{
    if (character < 0x80) {
        out[0] = (char)character;
        return 1;
    }
    out[0] = (char)(0xc0 | character >> 6);
    out[1] = (char)(0x80 | (character & 0x3f));
    return 2;
}

// ---- The vocabulary ----

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
    v->text = need(bytes + 1, 1, "bytes of tokens");
    v->start = need(n + 1, sizeof *v->start, "tokens");
    v->type = need(n, sizeof *v->type, "tokens");
    v->slots = need(v->slot_mask + (size_t)1, sizeof *v->slots, "tokens");
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
    v->merges = need(v->merge_mask + (size_t)1, sizeof *v->merges, "merges");
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

// ---- One word ----
//
// Merging takes, again and again, the pair of neighbours with the lowest rank, of equal ranks the leftmost. A search
// over all pairs each time would be quadratic in the word, and a word may be a megabyte long (a run of letters or of
// punctuation, or, with SentencePiece's kind, the whole text), so the pairs wait in a binary heap: O(n log n). Pairs
// that a merge made invalid stay in the heap and are recognised when they come up.

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
    int32_t *ids;
    size_t n_ids, ids_room;
    symbol *symbols; // of one word
    uint32_t n;      // of them
    candidate *heap;
    size_t word_room; // symbols that fit; the heap has three times as many
    size_t heap_size;
    char *characters; // the word in the byte alphabet, for ignore_merges; twice word_room
};

word_merger *word_merger_open(const tokenizer *t, size_t ids_room)
{
    word_merger *w = need(1, sizeof *w, "words");
    *w = (word_merger){.t = t, .ids_room = ids_room};
    w->ids = need_more(NULL, ids_room, sizeof *w->ids, "token ids");
    return w;
}

void word_merger_close(word_merger *w)
{
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

void word_merger_put(word_merger *w, uint32_t id)
{
    if (w->n_ids == w->ids_room) {
        w->ids_room *= 2;
        w->ids = need_more(w->ids, w->ids_room, sizeof *w->ids, "token ids");
    }
    w->ids[w->n_ids++] = (int32_t)id;
}

static void reserve_word(word_merger *w, size_t size)
{
    if (size <= w->word_room) return;
    size_t room = w->word_room = size < 256 ? 256 : size + size / 2;
    free(w->symbols);
    free(w->heap);
    free(w->characters);
    // Each of the n-1 first pairs is one candidate, and each of the at most n-1 merges adds at most two.
    w->symbols = need_more(NULL, room, sizeof *w->symbols, "bytes of a word");
    w->heap = need_more(NULL, 3 * room, sizeof *w->heap, "pairs of a word");
    w->characters = need_more(NULL, 2 * room, 1, "bytes of a word");
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

void word_merger_word(word_merger *w, const char *word, size_t size)
{
    reserve_word(w, size);
    int64_t whole = w->t->ignore_merges ? find_whole(w, word, size) : -1;
    if (whole >= 0) {
        word_merger_put(w, (uint32_t)whole);
        return;
    }
    w->n = 0;
    if (w->t->byte_level) split_bytes(w, (const unsigned char *)word, size);
    else split_characters(w, (const unsigned char *)word, size);
    if (w->n) w->symbols[w->n - 1].next = NONE;
    merge_symbols(w);
    for (uint32_t i = w->n ? 0 : NONE; i != NONE; i = w->symbols[i].next) word_merger_put(w, w->symbols[i].id);
}
