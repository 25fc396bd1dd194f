// Text to ids: repair the UTF-8, cut out added tokens, normalise what stands between them, cut out the tokens that
// are found in normalised text, cut the rest into words, merge each word's parts.
#include "formats/need.h"
#include "profiler/text/tokenizer_parts.h"
#include "profiler/text/utf8.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

#define TEXT_MAX ((size_t)1 << 30) // repaired text is at most three times as long, so that positions fit 32 bits

typedef struct encoder {
    const tokenizer *t;
    word_merger *words;
    matcher *m;
    expression word_character;     // compiled when a token asks for it
    bool special;                  // control tokens are found in the text,
    const char *plain, *plain_end; // and where not, still outside of this part of it
    kvb_error *err;
} encoder;

// What is done with the text between the added tokens of an index; `first`: nothing stands before it.
typedef kvb_status plain_action(encoder *e, const char *text, size_t size, bool first);

static kvb_status encode_word(void *context, const char *word, size_t size)
{
    encoder *e = context;
    word_merger_word(e->words, word, size);
    return KVB_OK;
}

static kvb_status encode_words(encoder *e, const char *text, size_t size, bool first)
{
    char *owned;
    kvb_status status = normal_apply(&e->t->before_words, e->m, first, &text, &size, &owned, e->err);
    if (status == KVB_OK) status = cut_apply(e->t->cuts, e->t->n_cuts, e->m, text, size, encode_word, e, e->err);
    free(owned);
    return status;
}

// ---- Added tokens: texts that are found before anything else is done to a text, and never cut ----

// A token that is not UTF-8 cannot occur in repaired text; a match inside of a character would cut it.
static bool can_occur(const char *text, size_t size)
{
    bool valid = size > 0 && size <= UINT32_MAX;
    for (size_t at = 0; at < size && valid;) at += utf8_step((const unsigned char *)text + at, size - at, &valid);
    return valid;
}

void added_put(added_index *x, uint32_t id, const char *text, size_t size, uint8_t flags)
{
    if (!can_occur(text, size)) return;
    if (x->n == x->room) {
        x->room = x->room ? 2 * x->room : 64;
        x->tokens = need_more(x->tokens, x->room, sizeof *x->tokens, "added tokens");
    }
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

void added_free(added_index *x)
{
    for (size_t i = 0; i < x->n_owned; i++) free(x->owned[i]);
    free(x->owned);
    free(x->tokens);
    *x = (added_index){0};
}
// ---- Conditions of added tokens ----

// Characters that \s takes, one at a time, at the front or at the end of a text. All are below U+3001.
static bool is_space(const unsigned char *p, size_t n)
{
    if (n == 1) return (p[0] >= 9 && p[0] <= 13) || p[0] == ' ';
    uint32_t c = n == 2   ? (p[0] & 31u) << 6 | (p[1] & 63u)
                 : n == 3 ? (p[0] & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u)
                          : 0;
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

static size_t last_character(const char *text, size_t size)
{
    size_t n = 1;
    while (n < size && n < 4 && ((unsigned char)text[size - n] & 0xc0) == 0x80) n++;
    return n;
}

static size_t spaces_in_front(const char *text, size_t size)
{
    size_t at = 0;
    bool valid;
    while (at < size) {
        size_t step = utf8_step((const unsigned char *)text + at, size - at, &valid);
        if (!is_space((const unsigned char *)text + at, step)) break;
        at += step;
    }
    return at;
}

static size_t without_spaces_behind(const char *text, size_t size)
{
    while (size) {
        size_t step = last_character(text, size);
        if (!is_space((const unsigned char *)text + size - step, step)) break;
        size -= step;
    }
    return size;
}

static kvb_status is_word_character(encoder *e, const char *text, size_t size, bool *yes)
{
    size_t begin, end;
    *yes = false;
    if (size == 0) return KVB_OK;
    if (!e->word_character.code) {
        kvb_status status = expression_compile(&e->word_character, "\\w", 2, false, "added tokens", e->err);
        if (status != KVB_OK) return status;
    }
    kvb_status status = expression_next(&e->word_character, e->m, text, size, 0, &begin, &end, e->err);
    *yes = status == KVB_OK && begin == 0 && end > 0;
    return status;
}

static kvb_status stands_alone(encoder *e, const char *text, size_t size, size_t at, size_t end, bool *yes)
{
    size_t before = at ? last_character(text, at) : 0;
    bool left, right = false;
    kvb_status status = is_word_character(e, text + at - before, before, &left);
    if (status == KVB_OK) {
        bool valid;
        size_t step = end < size ? utf8_step((const unsigned char *)text + end, size - end, &valid) : 0;
        status = is_word_character(e, text + end, step, &right);
    }
    *yes = !left && !right;
    return status;
}

// ---- Finding added tokens ----

// Places are known in text that was not normalised only.
static bool control_found(const encoder *e, const added_index *x, const char *at)
{
    return e->special || (x == &e->t->raw && (at < e->plain || at >= e->plain_end));
}

// The longest one at the front of the text, or NULL.
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

// Gives what stands between the tokens of the index to `plain`, and puts their ids.
static kvb_status around_added(encoder *e, const added_index *x, const char *text, size_t size, bool first,
                               plain_action *plain)
{
    kvb_status status = KVB_OK;
    size_t from = 0;
    for (size_t at = 0; at < size && x->n && status == KVB_OK;) {
        const added_token *a = added_at(e, x, text + at, size - at);
        bool alone = true;
        if (a && a->flags & ADDED_SINGLE_WORD) status = stands_alone(e, text, size, at, at + a->size, &alone);
        if (!a || !alone || status != KVB_OK) {
            at += a ? a->size : 1;
            continue;
        }
        size_t end = a->flags & ADDED_LSTRIP ? from + without_spaces_behind(text + from, at - from) : at;
        if (end > from) status = plain(e, text + from, end - from, first && from == 0);
        if (status == KVB_OK) word_merger_put(e->words, a->id);
        at += a->size;
        if (a->flags & ADDED_RSTRIP) at += spaces_in_front(text + at, size - at);
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

// Encodes UTF-8.
static kvb_status encode_valid(encoder *e, const char *text, size_t size, int32_t **ids, size_t *n)
{
    e->words = word_merger_open(e->t, size / 2 + 16);
    e->m = matcher_open(size);
    kvb_status status = around_added(e, &e->t->raw, text, size, true, encode_normalised);
    if (status == KVB_OK) *ids = word_merger_take(e->words, n);
    expression_free(&e->word_character);
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
    if (size == 0) text = ""; // NULL is fine then
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
    free(owned);
    free(whole);
    return status;
}

kvb_status tokenizer_encode(const tokenizer *t, const char *text, size_t size, bool parse_special, int32_t **ids,
                            size_t *n, kvb_error *err)
{
    return tokenizer_encode_framed(t, "", text, size, "", parse_special, ids, n, err);
}
