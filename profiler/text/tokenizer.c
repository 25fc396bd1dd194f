// A tokenizer: the vocabulary (texts by id, ids by text, merges by the pair of ids that they join), its life, decoding,
// and encoding: repair the UTF-8, cut out added tokens, normalise what is between them, cut out the tokens that are
// found in normalised text, cut the rest into words, merge each word's parts (byte-pair encoding). It is made in
// tokenizer_gguf.c and tokenizer_json.c.
#include "formats/need.h"
#include "profiler/text/tokenizer_parts.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

// ---- GPT-2's alphabet: every byte stands for a printable character of one or two UTF-8 bytes, below U+0144 ----

// Printable bytes stand for themselves; the other 68 take the characters from U+0100 on, in order of their value.
static bool stands_for_itself(uint32_t byte)
{
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
}

static uint32_t byte_to_char(uint8_t byte)
{
    if (stands_for_itself(byte)) return byte;
    if (byte <= 32) return 256u + byte;
    if (byte <= 160) return 256u + 33 + (byte - 127u);
    return 256u + 33 + 34; // 173
}

// Returns the byte that a character stands for, or -1.
static int char_to_byte(uint32_t character)
{
    if (character < 256) return stands_for_itself(character) ? (int)character : -1;
    uint32_t n = character - 256;
    if (n <= 32) return (int)n;
    if (n < 33 + 34) return (int)(n - 33 + 127);
    return n == 33 + 34 ? 173 : -1;
}

// Writes a character below U+0800 as UTF-8. Returns its length, 1 or 2.
static size_t put_char(char *out, uint32_t character)
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

// A text in two pieces, so that the result of a merge is looked up without joining them.
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

// Sets the mask of a table for n entries that is at most half full, so that probing ends quickly, and always.
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

// Returns the slot that holds the text, or the empty one where it belongs.
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

// Returns NULL if the two do not merge.
static const merge *vocabulary_merge(const vocabulary *v, uint32_t left, uint32_t right)
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

static void vocabulary_free(vocabulary *v)
{
    free_all(v->text, v->start, v->type, v->slots, v->merges);
    *v = (vocabulary){0};
}

// ---- One word ----
//
// Merging takes, again and again, the pair of neighbours with the lowest rank, of equal ranks the leftmost. A search
// over all pairs each time would be quadratic in the word, and a word may be a megabyte long (a run of letters or of
// punctuation, or, with SentencePiece's kind, the whole text), so the pairs wait in a binary heap: O(n log n). Pairs
// that a merge made invalid stay in the heap and are recognised when they come up.

#define NO_SYMBOL UINT32_MAX

typedef struct symbol {
    uint32_t id;             // NO_SYMBOL once it has been merged into its left neighbour
    uint32_t previous, next; // positions of the neighbours, or NO_SYMBOL
} symbol;

typedef struct candidate {
    uint64_t order;  // rank << 32 | position of the left symbol
    uint32_t result; // the token that the pair makes; stale if the symbols there now make another one, or none
} candidate;

typedef struct word_merger {
    const tokenizer *t;
    int32_t *ids;
    size_t n_ids, ids_room;
    symbol *symbols; // of one word
    uint32_t n;      // of them
    candidate *heap;
    size_t word_room; // symbols that fit; the heap has three times as many
    size_t heap_size;
    char *characters; // the word in the byte alphabet, for ignore_merges; twice word_room
} word_merger;

static word_merger *word_merger_open(const tokenizer *t, size_t ids_room)
{
    word_merger *w = need(1, sizeof *w, "words");
    *w = (word_merger){.t = t, .ids_room = ids_room};
    w->ids = need_more(NULL, ids_room, sizeof *w->ids, "token ids");
    return w;
}

static void word_merger_close(word_merger *w)
{
    free_all(w->ids, w->symbols, w->heap, w->characters, w);
}

static void word_merger_put(word_merger *w, uint32_t id)
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
    free_all(w->symbols, w->heap, w->characters);
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
    uint32_t right = left == NO_SYMBOL ? NO_SYMBOL : w->symbols[left].next;
    if (right == NO_SYMBOL) return;
    const merge *m = vocabulary_merge(&w->t->v, w->symbols[left].id, w->symbols[right].id);
    if (m) heap_push(w, (candidate){(uint64_t)m->rank << 32 | left, m->result});
}

static void put_symbol(word_merger *w, int32_t id)
{
    // The left neighbour of the first is 0 - 1, which is NO_SYMBOL.
    w->symbols[w->n] = (symbol){(uint32_t)id, w->n - 1, w->n + 1};
    w->n++;
}

// Puts the unknown token, if there is one, in the place of something without a token; only one for a run of these if
// they are fused.
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
        if (left->id == NO_SYMBOL || left->next == NO_SYMBOL) continue;
        symbol *right = &w->symbols[left->next];
        const merge *m = vocabulary_merge(&w->t->v, left->id, right->id);
        if (!m || m->result != c.result) continue;
        left->id = m->result;
        left->next = right->next;
        right->id = NO_SYMBOL;
        if (left->next != NO_SYMBOL) w->symbols[left->next].previous = (uint32_t)c.order;
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

static void word_merger_word(word_merger *w, const char *word, size_t size)
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
    if (w->n) w->symbols[w->n - 1].next = NO_SYMBOL;
    merge_symbols(w);
    for (uint32_t i = w->n ? 0 : NO_SYMBOL; i != NO_SYMBOL; i = w->symbols[i].next)
        word_merger_put(w, w->symbols[i].id);
}

// ---- A text that grows ----

typedef struct buffer {
    char *text;
    size_t size, room;
} buffer;

static void append_bytes(buffer *b, const char *text, size_t size)
{
    if (size > b->room - b->size) {
        b->room = b->size + size + b->room / 2 + 64;
        b->text = need_more(b->text, b->room, 1, "bytes of normalised text");
    }
    if (size) memcpy(b->text + b->size, text, size);
    b->size += size;
}

// ---- Normalisation, a list of steps as tokenizer.json has them ----

static kvb_status compose(const char *text, size_t size, buffer *out, kvb_error *err)
{
    utf8proc_uint8_t *composed = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)size, &composed,
                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (n < 0) {
        free(composed);
        return kvb_fail(err, KVB_ARGUMENT, "text to NFC: %s", utf8proc_errmsg(n));
    }
    *out = (buffer){(char *)composed, (size_t)n, (size_t)n};
    return KVB_OK;
}

static kvb_status replace(const normal_step *step, matcher *m, const char *text, size_t size, size_t most, buffer *out,
                          kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t at = 0, begin, end; at < size && status == KVB_OK; at = end) {
        status = expression_next(&step->pattern, m, text, size, at, &begin, &end, err);
        if (status != KVB_OK) break;
        append_bytes(out, text + at, begin - at);
        if (begin < end) append_bytes(out, step->text, step->size);
        if (out->size > most)
            status = kvb_fail(err, KVB_UNSUPPORTED,
                              "the tokenizer's normalizer makes more than %zu bytes of a text; give token ids instead "
                              "of text",
                              most);
    }
    return status;
}

static bool is_ascii(const char *text, size_t size)
{
    unsigned char all = 0;
    for (size_t i = 0; i < size; i++) all |= (unsigned char)text[i];
    return all < 0x80;
}

// Whether it is clear without applying the step that it leaves this text as it is.
static bool is_idle(const normal_step *step, bool first, const char *text, size_t size)
{
    if (size == 0) return true;
    if (step->kind == NORMAL_NFC) return is_ascii(text, size);
    return step->kind == NORMAL_PREPEND &&
           ((step->first_only && !first) ||
            (step->unless_there && size >= step->size && memcmp(text, step->text, step->size) == 0));
}

// Applies the steps to text [*size] and points *text to the result, which is in *owned unless it is the text itself.
// The caller frees *owned, also after a failure. `first`: nothing comes before the text.
static kvb_status normal_apply(const normal_list *list, matcher *m, bool first, const char **text, size_t *size,
                               char **owned, kvb_error *err)
{
    size_t most = 64 * *size + (1 << 20); // no honest steps make a text so much longer; hostile ones would fill memory
    kvb_status status = KVB_OK;
    *owned = NULL;
    for (size_t i = 0; i < list->n && status == KVB_OK; i++) {
        const normal_step *step = &list->steps[i];
        if (is_idle(step, first, *text, *size)) continue;
        buffer out = {0};
        if (step->kind == NORMAL_NFC) status = compose(*text, *size, &out, err);
        else if (step->kind == NORMAL_REPLACE) status = replace(step, m, *text, *size, most, &out, err);
        else append_bytes(&out, step->text, step->size), append_bytes(&out, *text, *size);
        free(*owned);
        *owned = out.text;
        *text = out.text ? out.text : "";
        *size = out.size;
    }
    return status;
}

static void normal_free(normal_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        expression_free(&list->steps[i].pattern);
        free(list->steps[i].text);
    }
    list->n = 0;
}

// ---- Cutting, another such list ----

typedef struct cutter {
    const tokenizer *t;
    matcher *m;
    word_merger *words;
    kvb_error *err;
} cutter;

// A piece that is held back because the next one may join it.
typedef struct waiting {
    size_t begin, end;
    bool there, separator;
} waiting;

// Cuts text with the steps from `step` on, each cutting the pieces of the one before, and merges the words in order.
static kvb_status cut_piece(const cutter *c, size_t step, const char *text, size_t size);

static kvb_status let_go(const cutter *c, size_t step, const char *text, waiting *w)
{
    bool drop = !w->there || w->begin == w->end || (w->separator && c->t->cuts[step].behaviour == CUT_REMOVED);
    w->there = false;
    return drop ? KVB_OK : cut_piece(c, step + 1, text + w->begin, w->end - w->begin);
}

static bool joins(cut_behaviour how, const waiting *w, bool separator)
{
    if (!w->there) return false;
    if (how == CUT_CONTIGUOUS) return w->separator == separator;
    return (how == CUT_PREVIOUS && !w->separator && separator) || (how == CUT_NEXT && w->separator && !separator);
}

// Takes the next piece of a step: it joins the waiting piece, or lets that go on and waits itself.
static kvb_status put_piece(const cutter *c, size_t step, const char *text, waiting *w, size_t begin, size_t end,
                            bool found)
{
    if (begin == end) return KVB_OK;
    bool separator = found != c->t->cuts[step].invert;
    if (joins(c->t->cuts[step].behaviour, w, separator)) {
        w->end = end;
        // A separator and its neighbour are complete; a contiguous run may grow further.
        return c->t->cuts[step].behaviour == CUT_CONTIGUOUS ? KVB_OK : let_go(c, step, text, w);
    }
    kvb_status status = let_go(c, step, text, w);
    *w = (waiting){begin, end, true, separator};
    return status;
}

static kvb_status cut_piece(const cutter *c, size_t step, const char *text, size_t size)
{
    if (step == c->t->n_cuts) {
        word_merger_word(c->words, text, size);
        return KVB_OK;
    }
    waiting w = {0};
    kvb_status status = KVB_OK;
    for (size_t at = 0, begin, end; at < size && status == KVB_OK; at = end) {
        status = expression_next(&c->t->cuts[step].separator, c->m, text, size, at, &begin, &end, c->err);
        if (status == KVB_OK) status = put_piece(c, step, text, &w, at, begin, false);
        if (status == KVB_OK) status = put_piece(c, step, text, &w, begin, end, true);
    }
    return status == KVB_OK ? let_go(c, step, text, &w) : status;
}

// ---- Added tokens: texts that are found before anything else is done to a text, and never cut ----

// A token that is not UTF-8 cannot occur in repaired text, and a match inside a character would cut it.
static bool can_occur(const char *text, size_t size)
{
    bool valid = size > 0 && size <= UINT32_MAX;
    for (size_t at = 0; at < size && valid;) at += utf8_step((const unsigned char *)text + at, size - at, &valid);
    return valid;
}

void added_put(added_index *x, uint32_t id, const char *text, size_t size, uint8_t flags)
{
    if (!can_occur(text, size)) return;
    x->tokens = need_one_more(x->tokens, x->n, sizeof *x->tokens, "added tokens");
    x->tokens[x->n++] = (added_token){id, text, (uint32_t)size, flags};
}

kvb_status added_put_normalised(added_index *x, const normal_list *normal, uint32_t id, const char *text, size_t size,
                                uint8_t flags, kvb_error *err)
{
    char *owned = NULL;
    matcher *m = matcher_open(size);
    kvb_status status = normal_apply(normal, m, true, &text, &size, &owned, err);
    if (status == KVB_OK) {
        char *copy = need_copy(text, size, 1, "bytes of an added token");
        x->owned = need_more(x->owned, x->n_owned + 1, sizeof *x->owned, "texts of added tokens");
        x->owned[x->n_owned++] = copy;
        added_put(x, id, copy, size, flags);
    }
    matcher_close(m);
    free(owned);
    return status;
}

static int compare_added(const void *a, const void *b)
{
    const added_token *x = a, *y = b;
    unsigned char first_x = (unsigned char)x->text[0], first_y = (unsigned char)y->text[0];
    if (first_x != first_y) return first_x < first_y ? -1 : 1;
    if (x->size != y->size) return x->size > y->size ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

void added_sort(added_index *x)
{
    if (x->n) qsort(x->tokens, x->n, sizeof *x->tokens, compare_added);
    for (uint32_t i = 0, first = 0; first <= 256; first++) {
        while (i < x->n && (unsigned char)x->tokens[i].text[0] < first) i++;
        x->first[first] = first == 256 ? x->n : i;
    }
}

static void added_free(added_index *x)
{
    for (size_t i = 0; i < x->n_owned; i++) free(x->owned[i]);
    free_all(x->owned, x->tokens);
    *x = (added_index){0};
}

// ---- Life ----

tokenizer *tokenizer_new(void)
{
    tokenizer *t = need(1, sizeof *t, "tokenizers");
    t->special = (special_ids){-1, -1, -1, false};
    t->unknown = -1;
    for (int b = 0; b < 256; b++) t->byte_id[b] = -1;
    return t;
}

void tokenizer_free(tokenizer *t)
{
    if (!t) return;
    vocabulary_free(&t->v);
    added_free(&t->raw);
    added_free(&t->normalised);
    normal_free(&t->normal);
    normal_free(&t->before_words);
    for (size_t i = 0; i < t->n_cuts; i++) expression_free(&t->cuts[i].separator);
    free_all(t->pre, t->ends, t->chat_template, t);
}

void tokenizer_find_bytes(tokenizer *t)
{
    for (int b = 0; b < 256; b++) {
        char text[8];
        size_t size = t->byte_level ? put_char(text, byte_to_char((uint8_t)b))
                                    : (size_t)snprintf(text, sizeof text, "<0x%02X>", b);
        t->byte_id[b] = t->byte_level || t->byte_fallback ? (int32_t)vocabulary_find(&t->v, text, size) : -1;
    }
}

void tokenizer_add_end(tokenizer *t, int32_t id)
{
    if (id < 0 || tokenizer_is_end(t, id)) return;
    t->ends = need_more(t->ends, t->n_ends + 1, sizeof *t->ends, "end tokens");
    t->ends[t->n_ends++] = id;
}

// ---- Decoding ----

// Decodes a token of the byte alphabet. A character outside the alphabet (in a damaged or unusual vocabulary) is copied
// as it is.
static size_t decode_alphabet(const unsigned char *p, size_t size, char *out, size_t cap)
{
    size_t n = 0;
    for (size_t at = 0, step; at < size; at += step) {
        bool valid;
        step = utf8_step(p + at, size - at, &valid);
        uint32_t character = step == 2 ? (p[at] & 0x1fu) << 6 | (p[at + 1] & 0x3fu) : p[at];
        int byte = valid && step <= 2 ? char_to_byte(character) : -1;
        for (size_t i = 0; i < (byte >= 0 ? 1 : step); i++, n++)
            if (n < cap) out[n] = (char)(byte >= 0 ? byte : p[at + i]);
    }
    return n;
}

static int hex_digit(unsigned char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// Returns the byte that "<0xNN>" stands for, or -1.
static int byte_of(const unsigned char *p, size_t size)
{
    if (size != 6 || memcmp(p, "<0x", 3) != 0 || p[5] != '>') return -1;
    int high = hex_digit(p[3]), low = hex_digit(p[4]);
    return high < 0 || low < 0 ? -1 : 16 * high + low;
}

// Decodes a token of SentencePiece's kind: U+2581 is a space, "<0xNN>" a byte.
static size_t decode_piece(const unsigned char *p, size_t size, char *out, size_t cap)
{
    int byte = byte_of(p, size);
    if (byte >= 0) {
        if (cap) out[0] = (char)byte;
        return 1;
    }
    size_t n = 0;
    for (size_t at = 0; at < size; n++) {
        bool space = size - at >= 3 && memcmp(p + at, LOW_LINE, 3) == 0;
        if (n < cap) out[n] = space ? ' ' : (char)p[at];
        at += space ? 3 : 1;
    }
    return n;
}

// Decodes one token; `strip`: without the space at its front.
static size_t decode_token(const tokenizer *t, uint32_t id, bool strip, char *out, size_t cap)
{
    const unsigned char *p = (const unsigned char *)t->v.text + t->v.start[id];
    size_t size = token_bytes(&t->v, id);
    bool raw = t->v.type[id] == TOKEN_CONTROL || t->v.type[id] == TOKEN_USER_DEFINED;
    if (!raw && t->byte_level) return decode_alphabet(p, size, out, cap);
    if (!raw) {
        size_t skip = strip && size >= 3 && memcmp(p, LOW_LINE, 3) == 0 ? 3 : 0;
        return decode_piece(p + skip, size - skip, out, cap);
    }
    if (cap) memcpy(out, p, size < cap ? size : cap);
    return size;
}

size_t tokenizer_decode(const tokenizer *t, const int32_t *ids, size_t n, char *out, size_t cap)
{
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || (uint32_t)ids[i] >= t->v.size) continue;
        bool room = total < cap;
        total += decode_token(t, (uint32_t)ids[i], i == 0 && t->strip_first, room ? out + total : NULL,
                              room ? cap - total : 0);
    }
    return total;
}

// ---- Accessors ----

special_ids tokenizer_special(const tokenizer *t)
{
    return t->special;
}
size_t tokenizer_size(const tokenizer *t)
{
    return t->v.size;
}
const char *tokenizer_pre(const tokenizer *t)
{
    return t->pre;
}
const char *tokenizer_sha256(const tokenizer *t)
{
    return t->sha256;
}
const char *tokenizer_chat_template(const tokenizer *t)
{
    return t->chat_template;
}

bool tokenizer_is_end(const tokenizer *t, int32_t id)
{
    for (size_t i = 0; i < t->n_ends; i++)
        if (t->ends[i] == id) return true;
    return false;
}

// ---- Encoding ----

#define TEXT_MAX ((size_t)1 << 30) // repaired text is at most three times as long, so that positions fit 32 bits

typedef struct encoder {
    const tokenizer *t;
    word_merger *words;
    matcher *m;
    bool special;                  // control tokens are found in the whole text,
    const char *plain, *plain_end; // else only outside this part of it
    kvb_error *err;
} encoder;

// What to do with the text between added tokens; `first`: nothing comes before it.
typedef kvb_status plain_action(encoder *e, const char *text, size_t size, bool first);

static kvb_status encode_words(encoder *e, const char *text, size_t size, bool first)
{
    const cutter c = {e->t, e->m, e->words, e->err};
    char *owned;
    kvb_status status = normal_apply(&e->t->before_words, e->m, first, &text, &size, &owned, e->err);
    if (status == KVB_OK && size) status = cut_piece(&c, 0, text, size);
    free(owned);
    return status;
}

// ---- Finding added tokens ----

// Whether a control token at this place is found. Only text that was not normalised still has its places.
static bool control_found(const encoder *e, const added_index *x, const char *at)
{
    return e->special || (x == &e->t->raw && (at < e->plain || at >= e->plain_end));
}

// Returns the longest added token at the beginning of the text, or NULL.
static const added_token *added_at(const encoder *e, const added_index *x, const char *text, size_t size)
{
    unsigned char first = (unsigned char)text[0];
    for (uint32_t i = x->first[first]; i < x->first[first + 1]; i++) {
        const added_token *a = &x->tokens[i];
        if (e->t->v.type[a->id] == TOKEN_CONTROL && !control_found(e, x, text)) continue;
        if (a->size <= size && memcmp(a->text, text, a->size) == 0) return a;
    }
    return NULL;
}

// Finds the index's tokens in a text, puts their ids, and calls `plain` for the text between them.
static kvb_status around_added(encoder *e, const added_index *x, const char *text, size_t size, bool first,
                               plain_action *plain)
{
    kvb_status status = KVB_OK;
    size_t from = 0;
    for (size_t at = 0; at < size && x->n && status == KVB_OK;) {
        const added_token *a = added_at(e, x, text + at, size - at);
        if (!a) {
            at++;
            continue;
        }
        size_t end = a->flags & ADDED_LSTRIP ? at - utf8_spaces_behind(text + from, at - from) : at;
        if (end > from) status = plain(e, text + from, end - from, first && from == 0);
        if (status == KVB_OK) word_merger_put(e->words, a->id);
        at += a->size;
        if (a->flags & ADDED_RSTRIP) at += utf8_spaces_before(text + at, size - at);
        from = at;
    }
    if (status == KVB_OK && from < size) status = plain(e, text + from, size - from, first && from == 0);
    return status;
}

static kvb_status encode_normalised(encoder *e, const char *text, size_t size, bool first)
{
    char *owned;
    kvb_status status = normal_apply(&e->t->normal, e->m, first, &text, &size, &owned, e->err);
    if (status == KVB_OK) status = around_added(e, &e->t->normalised, text, size, first, encode_words);
    free(owned);
    return status;
}

// Encodes text that is valid UTF-8.
static kvb_status encode_valid(encoder *e, const char *text, size_t size, int32_t **ids, size_t *n)
{
    e->words = word_merger_open(e->t, size / 2 + 16);
    e->m = matcher_open(size);
    kvb_status status = around_added(e, &e->t->raw, text, size, true, encode_normalised);
    if (status == KVB_OK) {
        *ids = e->words->ids;
        *n = e->words->n_ids;
        e->words->ids = NULL; // the caller's now
    }
    matcher_close(e->m);
    word_merger_close(e->words);
    return status;
}

kvb_status tokenizer_encode_framed(const tokenizer *t, const char *front, const char *text, size_t size,
                                   const char *back, bool parse_special, int32_t **ids, size_t *n, kvb_error *err)
{
    *ids = NULL;
    *n = 0;
    if (size > TEXT_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "expected at most %zu bytes of text, found %zu; split it", TEXT_MAX, size);
    if (size == 0) text = ""; // it may be NULL
    const char *repaired = NULL;
    char *owned = NULL, *whole = NULL;
    size_t before = strlen(front), behind = strlen(back), middle = 0;
    utf8_repair(text, size, &repaired, &middle, &owned);
    if (before || behind) {
        whole = need(before + middle + behind + 1, 1, "bytes of a text");
        memcpy(whole, front, before);
        memcpy(whole + before, repaired, middle);
        memcpy(whole + before + middle, back, behind);
        repaired = whole;
    }
    encoder e = {t, .special = parse_special, .plain = repaired + before, .plain_end = repaired + before + middle,
                 .err = err};
    kvb_status status = encode_valid(&e, repaired, before + middle + behind, ids, n);
    free_all(owned, whole);
    return status;
}

kvb_status tokenizer_encode(const tokenizer *t, const char *text, size_t size, bool parse_special, int32_t **ids,
                            size_t *n, kvb_error *err)
{
    return tokenizer_encode_framed(t, "", text, size, "", parse_special, ids, n, err);
}
