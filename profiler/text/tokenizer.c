// A tokenizer's life, its accessors, and decoding. It is made in tokenizer_gguf.c and tokenizer_json.c; encoding is in
// tokenizer_encode.c.
#include "formats/need.h"
#include "profiler/text/tokenizer_json.h"
#include "profiler/text/tokenizer_parts.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

tokenizer *tokenizer_new(void)
{
    tokenizer *t = need(1, sizeof *t, "tokenizers");
    t->bos = t->eos = t->eot = t->unknown = -1;
    for (int b = 0; b < 256; b++) t->byte_id[b] = -1;
    return t;
}

kvb_status tokenizer_open(tokenizer **out, const weights *w, const char *pre, kvb_error *err)
{
    const gguf_file *file = weights_gguf_file(w);
    const char *folder = weights_folder_path(w);
    *out = NULL;
    if (file) return tokenizer_from_gguf_as(out, file, pre, err);
    if (pre) return kvb_fail(err, KVB_ARGUMENT, "--pre: %s says itself how words are cut; leave it out", folder);
    return tokenizer_from_folder(out, folder, err);
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
    free(t->pre);
    free(t->ends);
    free(t->chat_template);
    free(t);
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

// A token of the byte alphabet, as bytes. A character outside the alphabet (in a damaged or unusual vocabulary) stays
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

// The byte of "<0xNN>", or -1.
static int byte_of(const unsigned char *p, size_t size)
{
    if (size != 6 || memcmp(p, "<0x", 3) != 0 || p[5] != '>') return -1;
    int high = hex_digit(p[3]), low = hex_digit(p[4]);
    return high < 0 || low < 0 ? -1 : 16 * high + low;
}

// SentencePiece's kind: U+2581 is a space, "<0xNN>" a byte.
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

// `strip`: without the space at its front.
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

int32_t tokenizer_bos(const tokenizer *t)
{
    return t->bos;
}
int32_t tokenizer_eos(const tokenizer *t)
{
    return t->eos;
}
int32_t tokenizer_eot(const tokenizer *t)
{
    return t->eot;
}
bool tokenizer_add_bos(const tokenizer *t)
{
    return t->add_bos;
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

bool tokenizer_is_control(const tokenizer *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->v.size && t->v.type[id] == TOKEN_CONTROL;
}

bool tokenizer_is_end(const tokenizer *t, int32_t id)
{
    for (size_t i = 0; i < t->n_ends; i++)
        if (t->ends[i] == id) return true;
    return false;
}
