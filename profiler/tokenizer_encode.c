// Text to ids: repair the UTF-8, cut out special tokens, cut the rest into words, merge each word's bytes pair by pair.
//
// Merging takes, again and again, the pair of neighbours with the lowest rank, of equal ranks the leftmost. A search
// over all pairs each time would be quadratic in the word, and a word may be a megabyte long (a run of letters or of
// punctuation), so the pairs wait in a binary heap: O(n log n). Pairs that a merge made invalid stay in the heap and
// are recognised when they come up.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "profiler/tokenizer.h"
#include "profiler/tokenizer_parts.h"
#include "profiler/utf8.h"
#include "runtime/fail.h"
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_MAX ((size_t)1 << 30) // repaired text is at most three times as long, so that positions fit 32 bits
#define NONE UINT32_MAX

typedef struct symbol {
    uint32_t id;             // NONE once it has been merged into its left neighbour
    uint32_t previous, next; // positions of the neighbours, or NONE
} symbol;

typedef struct candidate {
    uint64_t order;  // rank << 32 | position of the left symbol
    uint32_t result; // the token that the pair made; stale when the symbols there make another one, or none, by now
} candidate;

typedef struct encoder {
    const tokenizer *t;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    int32_t *ids;
    size_t n_ids, ids_room;
    symbol *symbols; // of one word
    candidate *heap;
    size_t word_room; // symbols that fit; the heap has three times as many
    size_t heap_size;
    char *characters; // the word in the byte alphabet, for ignore_merges; twice word_room
    kvb_error *err;
} encoder;

static kvb_status no_memory(const encoder *e)
{
    return kvb_fail(e->err, KVB_MEMORY, "not enough memory to encode the text");
}

static kvb_status put_id(encoder *e, uint32_t id)
{
    if (e->n_ids == e->ids_room) {
        size_t room = e->ids_room * 2;
        int32_t *grown = realloc(e->ids, room * sizeof *grown);
        if (!grown) return no_memory(e);
        e->ids = grown;
        e->ids_room = room;
    }
    e->ids[e->n_ids++] = (int32_t)id;
    return KVB_OK;
}

// ---- one word ----

static kvb_status reserve_word(encoder *e, size_t size)
{
    if (size <= e->word_room) return KVB_OK;
    size_t room = size < 256 ? 256 : size + size / 2;
    free(e->symbols);
    free(e->heap);
    free(e->characters);
    // Each of the n-1 first pairs is one candidate, and each of the at most n-1 merges adds at most two.
    e->symbols = malloc(room * sizeof *e->symbols);
    e->heap = malloc(3 * room * sizeof *e->heap);
    e->characters = malloc(2 * room);
    e->word_room = e->symbols && e->heap && e->characters ? room : 0;
    return e->word_room ? KVB_OK : no_memory(e);
}

static void heap_push(encoder *e, candidate c)
{
    size_t i = e->heap_size++;
    for (size_t parent; i > 0 && e->heap[parent = (i - 1) / 2].order > c.order; i = parent)
        e->heap[i] = e->heap[parent];
    e->heap[i] = c;
}

static candidate heap_pop(encoder *e)
{
    candidate top = e->heap[0], last = e->heap[--e->heap_size];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < e->heap_size; i = child) {
        if (child + 1 < e->heap_size && e->heap[child + 1].order < e->heap[child].order) child++;
        if (e->heap[child].order >= last.order) break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = last;
    return top;
}

static void push_pair(encoder *e, uint32_t left)
{
    uint32_t right = left == NONE ? NONE : e->symbols[left].next;
    if (right == NONE) return;
    const merge *m = vocabulary_merge(&e->t->v, e->symbols[left].id, e->symbols[right].id);
    if (m) heap_push(e, (candidate){(uint64_t)m->rank << 32 | left, m->result});
}

// One symbol per byte. Bytes without a token become the unknown token, one for a run of them, or vanish when there is
// none.
static uint32_t split_bytes(encoder *e, const unsigned char *word, size_t size)
{
    uint32_t n = 0;
    bool in_unknown = false;
    for (size_t i = 0; i < size; i++) {
        int32_t id = e->t->byte_id[word[i]];
        bool known = id >= 0;
        if (known || (e->t->unknown >= 0 && !in_unknown)) {
            // In front of the first stands NONE, which is 0 - 1.
            e->symbols[n] = (symbol){(uint32_t)(known ? id : e->t->unknown), n - 1, n + 1};
            n++;
        }
        in_unknown = !known;
    }
    if (n) e->symbols[n - 1].next = NONE;
    return n;
}

static void merge_symbols(encoder *e, uint32_t n)
{
    e->heap_size = 0;
    for (uint32_t i = 0; i < n; i++) push_pair(e, i);
    while (e->heap_size) {
        candidate c = heap_pop(e);
        symbol *left = &e->symbols[(uint32_t)c.order];
        if (left->id == NONE || left->next == NONE) continue;
        symbol *right = &e->symbols[left->next];
        const merge *m = vocabulary_merge(&e->t->v, left->id, right->id);
        if (!m || m->result != c.result) continue;
        left->id = m->result;
        left->next = right->next;
        right->id = NONE;
        if (left->next != NONE) e->symbols[left->next].previous = (uint32_t)c.order;
        push_pair(e, left->previous);
        push_pair(e, (uint32_t)c.order);
    }
}

static int64_t find_whole(encoder *e, const unsigned char *word, size_t size)
{
    size_t n = 0;
    for (size_t i = 0; i < size; i++) n += put_char(e->characters + n, byte_to_char(word[i]));
    return vocabulary_find(&e->t->v, e->characters, n);
}

static kvb_status encode_word(encoder *e, const unsigned char *word, size_t size)
{
    kvb_status status = reserve_word(e, size);
    if (status != KVB_OK) return status;
    int64_t whole = e->t->pre->ignore_merges ? find_whole(e, word, size) : -1;
    if (whole >= 0) return put_id(e, (uint32_t)whole);
    uint32_t n = split_bytes(e, word, size);
    merge_symbols(e, n);
    for (uint32_t i = n ? 0 : NONE; i != NONE && status == KVB_OK; i = e->symbols[i].next)
        status = put_id(e, e->symbols[i].id);
    return status;
}

// ---- text between special tokens ----

static kvb_status encode_plain(encoder *e, const char *text, size_t size)
{
    kvb_status status = KVB_OK;
    for (size_t at = 0; at < size && status == KVB_OK;) {
        // The text has been repaired, so PCRE2 need not look for broken UTF-8 again at every word.
        uint32_t options = PCRE2_NO_UTF_CHECK;
        int found = pcre2_match(e->t->words, (PCRE2_SPTR)text, size, at, options, e->match, e->limits);
        if (found == PCRE2_ERROR_JIT_STACKLIMIT) // the interpreter takes its stack from the heap
            found = pcre2_match(e->t->words, (PCRE2_SPTR)text, size, at, options | PCRE2_NO_JIT, e->match, e->limits);
        size_t end = found > 0 ? pcre2_get_ovector_pointer(e->match)[1] : at;
        if (end <= at)
            return kvb_fail(
                e->err, found == PCRE2_ERROR_NOMEMORY || found == PCRE2_ERROR_HEAPLIMIT ? KVB_MEMORY : KVB_UNSUPPORTED,
                "text byte %zu: the expression of pre-tokenizer %s: PCRE2 error %d", at, e->t->pre->name, found);
        status = encode_word(e, (const unsigned char *)text + at, end - at);
        at = end;
    }
    return status;
}

// The longest special token at the front of the text, or NONE.
static uint32_t special_at(const tokenizer *t, const char *text, size_t size, bool control)
{
    unsigned char first = (unsigned char)text[0];
    for (uint32_t i = t->special_start[first]; i < t->special_start[first + 1]; i++) {
        uint32_t id = t->special[i], length = t->v.start[id + 1] - t->v.start[id];
        if (t->v.type[id] == TOKEN_CONTROL && !control) continue;
        if (length <= size && memcmp(t->v.text + t->v.start[id], text, length) == 0) return id;
    }
    return NONE;
}

static kvb_status encode_all(encoder *e, const char *text, size_t size, bool parse_special)
{
    kvb_status status = KVB_OK;
    size_t plain = 0;
    for (size_t at = 0; at < size && status == KVB_OK;) {
        uint32_t id = special_at(e->t, text + at, size - at, parse_special);
        if (id == NONE) {
            at++;
            continue;
        }
        status = encode_plain(e, text + plain, at - plain);
        if (status == KVB_OK) status = put_id(e, id);
        at += e->t->v.start[id + 1] - e->t->v.start[id];
        plain = at;
    }
    return status == KVB_OK ? encode_plain(e, text + plain, size - plain) : status;
}

kvb_status tokenizer_encode(const tokenizer *t, const char *text, size_t size, bool parse_special, int32_t **ids,
                            size_t *n, kvb_error *err)
{
    *ids = NULL;
    *n = 0;
    if (size > TEXT_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "expected at most %zu bytes of text, found %zu; split it", TEXT_MAX, size);
    if (size == 0) text = ""; // NULL is fine then
    const char *repaired = NULL;
    char *owned = NULL;
    size_t repaired_size = 0;
    encoder e = {.t = t, .err = err, .ids_room = size / 2 + 16};
    kvb_status status = utf8_repair(text, size, &repaired, &repaired_size, &owned, err);
    if (status != KVB_OK) return status;

    e.match = pcre2_match_data_create(1, NULL); // only the whole match is of interest
    e.limits = pcre2_match_context_create(NULL);
    e.ids = malloc(e.ids_room * sizeof *e.ids);
    if (e.match && e.limits && e.ids) {
        // The limits guard against patterns that explode; ours backtrack over one run of characters, however long it
        // is.
        pcre2_set_match_limit(e.limits, UINT32_MAX);
        pcre2_set_heap_limit(e.limits, UINT32_MAX);
        status = encode_all(&e, repaired, repaired_size, parse_special);
    } else {
        status = no_memory(&e);
    }
    if (status == KVB_OK) {
        *ids = e.ids;
        *n = e.n_ids;
    } else {
        free(e.ids);
    }
    pcre2_match_data_free(e.match);
    pcre2_match_context_free(e.limits);
    free(e.symbols);
    free(e.heap);
    free(e.characters);
    free(owned);
    return status;
}
