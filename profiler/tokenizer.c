// Making a tokenizer from the metadata of a GGUF file, its accessors, and decoding. Encoding is in tokenizer_encode.c.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "profiler/tokenizer.h"
#include "formats/sha256.h"
#include "profiler/tokenizer_parts.h"
#include "profiler/utf8.h"
#include "runtime/fail.h"
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

static kvb_status read_pre(tokenizer *t, const gguf_file *f, const char *pre, kvb_error *err)
{
    gguf_string model, name = {0};
    kvb_status status = gguf_get_string(f, "tokenizer.ggml.model", &model, err);
    if (status != KVB_OK) return status;
    if (!gguf_string_is(model, "gpt2"))
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "%s: tokenizer.ggml.model: expected gpt2 (byte-level BPE), found '%.*s'; give token ids instead of text",
            f->name, (int)(model.size < 60 ? model.size : 60), model.data);
    if (pre) {
        name = (gguf_string){pre, strlen(pre)};
    } else if (!gguf_find(f, "tokenizer.ggml.pre")) {
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: tokenizer.ggml.pre is missing, so how words are cut is not known (known here: %s); "
                        "convert the model again with a current tool, or name one",
                        f->name, pre_tokenizer_names());
    } else {
        status = gguf_get_string(f, "tokenizer.ggml.pre", &name, err);
        if (status != KVB_OK) return status;
    }
    t->pre = pre_tokenizer_find(name);
    if (!t->pre)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%s: tokenizer.ggml.pre: expected one of %s, found '%.*s'; give token ids instead of text",
                        f->name, pre_tokenizer_names(), (int)(name.size < 60 ? name.size : 60), name.data);
    bool prefix = false;
    status = gguf_get_bool_or(f, "tokenizer.ggml.add_space_prefix", false, &prefix, err);
    if (status == KVB_OK && prefix)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: tokenizer.ggml.add_space_prefix: expected false, found true",
                        f->name);
    return status;
}

static kvb_status compile_words(tokenizer *t, const gguf_file *f, kvb_error *err)
{
    int code;
    PCRE2_SIZE offset;
    // Anchored: words follow each other without gaps, so a match must begin where the last one ended.
    t->words = pcre2_compile((PCRE2_SPTR)t->pre->pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED,
                             &code, &offset, NULL);
    if (!t->words)
        return kvb_fail(err, code == PCRE2_ERROR_HEAP_FAILED ? KVB_MEMORY : KVB_UNSUPPORTED,
                        "%s: the expression of pre-tokenizer %s: PCRE2 error %d at %zu; is PCRE2 built with Unicode?",
                        f->name, t->pre->name, code, (size_t)offset);
    (void)pcre2_jit_compile(t->words, PCRE2_JIT_COMPLETE); // without JIT the interpreter does the same, more slowly
    return KVB_OK;
}

static kvb_status read_vocabulary(tokenizer *t, const gguf_file *f, gguf_array *types, gguf_array *merges,
                                  kvb_error *err)
{
    gguf_array tokens;
    kvb_status status = gguf_get_array(f, "tokenizer.ggml.tokens", GGUF_VALUE_STRING, &tokens, err);
    bool typed = gguf_find(f, "tokenizer.ggml.token_type") != NULL;
    if (status == KVB_OK && typed) status = gguf_get_array(f, "tokenizer.ggml.token_type", GGUF_VALUE_I32, types, err);
    if (status == KVB_OK) status = gguf_get_array(f, "tokenizer.ggml.merges", GGUF_VALUE_STRING, merges, err);
    if (status == KVB_OK) status = vocabulary_begin(&t->v, f->name, &tokens, typed ? types : NULL, err);
    if (status == KVB_OK) status = vocabulary_add_merges(&t->v, f->name, merges, err);
    if (status != KVB_OK) return status;
    for (int b = 0; b < 256; b++) {
        char text[2];
        t->byte_id[b] = (int32_t)vocabulary_find(&t->v, text, put_char(text, byte_to_char((uint8_t)b)));
    }
    return KVB_OK;
}

static kvb_status read_id(const tokenizer *t, const gguf_file *f, const char *key, int32_t *id, kvb_error *err)
{
    uint32_t n;
    *id = -1;
    if (!gguf_find(f, key)) return KVB_OK;
    kvb_status status = gguf_get_u32(f, key, &n, err);
    if (status != KVB_OK) return status;
    if (n >= t->v.size)
        return kvb_fail(err, KVB_FORMAT, "%s: %s: expected a token id below %u, found %u; the file is damaged", f->name,
                        key, t->v.size, n);
    *id = (int32_t)n;
    return KVB_OK;
}

static kvb_status read_special_ids(tokenizer *t, const gguf_file *f, kvb_error *err)
{
    kvb_status status = read_id(t, f, "tokenizer.ggml.bos_token_id", &t->bos, err);
    if (status == KVB_OK) status = read_id(t, f, "tokenizer.ggml.eos_token_id", &t->eos, err);
    if (status == KVB_OK) status = read_id(t, f, "tokenizer.ggml.eot_token_id", &t->eot, err);
    if (status == KVB_OK) status = read_id(t, f, "tokenizer.ggml.unknown_token_id", &t->unknown, err);
    if (status == KVB_OK)
        status = gguf_get_bool_or(f, "tokenizer.ggml.add_bos_token", t->pre->add_bos && t->bos >= 0, &t->add_bos, err);
    if (status == KVB_OK && t->add_bos && t->bos < 0)
        return kvb_fail(
            err, KVB_FORMAT,
            "%s: tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing; the file is damaged",
            f->name);
    return status;
}

// Whether the token is looked for in the text. One that is not UTF-8 cannot occur there; a match inside of a
// character would cut it.
static bool is_special(const vocabulary *v, uint32_t id)
{
    const unsigned char *p = (const unsigned char *)v->text + v->start[id];
    size_t size = v->start[id + 1] - v->start[id];
    if (size == 0 || (v->type[id] != TOKEN_CONTROL && v->type[id] != TOKEN_USER_DEFINED)) return false;
    bool valid = true;
    for (size_t at = 0; at < size && valid;) at += utf8_step(p + at, size - at, &valid);
    return valid;
}

static int special_compare(const void *a, const void *b, void *context)
{
    const vocabulary *v = context;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    unsigned char first_x = (unsigned char)v->text[v->start[x]], first_y = (unsigned char)v->text[v->start[y]];
    if (first_x != first_y) return first_x < first_y ? -1 : 1;
    uint32_t size_x = v->start[x + 1] - v->start[x], size_y = v->start[y + 1] - v->start[y];
    if (size_x != size_y) return size_x > size_y ? -1 : 1;
    return x < y ? -1 : x > y;
}

static kvb_status index_special(tokenizer *t, const char *name, kvb_error *err)
{
    uint32_t n = 0;
    for (uint32_t id = 0; id < t->v.size; id++) n += is_special(&t->v, id);
    t->special = malloc((n + (size_t)1) * sizeof *t->special);
    if (!t->special) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %u special tokens", name, n);
    n = 0;
    for (uint32_t id = 0; id < t->v.size; id++)
        if (is_special(&t->v, id)) t->special[n++] = id;
    qsort_r(t->special, n, sizeof *t->special, special_compare, &t->v);
    for (uint32_t i = 0, first = 0; first <= 256; first++) {
        while (i < n && (unsigned char)t->v.text[t->v.start[t->special[i]]] < first) i++;
        t->special_start[first] = first == 256 ? n : i;
    }
    return KVB_OK;
}

static kvb_status hash_number(sha256_state *s, uint32_t n, kvb_error *err)
{
    unsigned char bytes[4] = {(unsigned char)n, (unsigned char)(n >> 8), (unsigned char)(n >> 16),
                              (unsigned char)(n >> 24)};
    return sha256_add(s, bytes, sizeof bytes, err);
}

static kvb_status hash_text(sha256_state *s, const char *text, size_t size, kvb_error *err)
{
    kvb_status status = hash_number(s, (uint32_t)size, err);
    return status == KVB_OK ? sha256_add(s, text, size, err) : status;
}

// What decides the ids, in one canonical form: numbers as u32 little-endian, texts as u32 length and bytes:
// "kvbudget-tokenizer-1", name of the pre-tokenizer, unknown id (as u32), number of tokens, each token's text and
// type, number of merges, each merge's text as in the file.
static kvb_status hash_tokenizer(tokenizer *t, const gguf_array *merges, kvb_error *err)
{
    static const char kind[] = "kvbudget-tokenizer-1";
    const vocabulary *v = &t->v;
    sha256_state *s;
    kvb_status status = sha256_begin(&s, err);
    if (status != KVB_OK) return status;
    status = hash_text(s, kind, sizeof kind - 1, err);
    if (status == KVB_OK) status = hash_text(s, t->pre->name, strlen(t->pre->name), err);
    if (status == KVB_OK) status = hash_number(s, (uint32_t)t->unknown, err);
    if (status == KVB_OK) status = hash_number(s, v->size, err);
    for (uint32_t id = 0; id < v->size && status == KVB_OK; id++) {
        status = hash_text(s, v->text + v->start[id], v->start[id + 1] - v->start[id], err);
        if (status == KVB_OK) status = hash_number(s, v->type[id], err);
    }
    if (status == KVB_OK) status = hash_number(s, (uint32_t)merges->count, err);
    gguf_array rest = *merges;
    for (gguf_string text; status == KVB_OK && gguf_next_string(&rest, &text);)
        status = hash_text(s, text.data, text.size, err);
    if (status == KVB_OK) status = sha256_end(s, t->sha256, err);
    sha256_free(s);
    return status;
}

kvb_status tokenizer_from_gguf_as(tokenizer **out, const gguf_file *f, const char *pre, kvb_error *err)
{
    *out = NULL;
    tokenizer *t = calloc(1, sizeof *t);
    if (!t) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for the tokenizer", f->name);
    gguf_array types = {0}, merges = {0};
    kvb_status status = read_pre(t, f, pre, err);
    if (status == KVB_OK) status = compile_words(t, f, err);
    if (status == KVB_OK) status = read_vocabulary(t, f, &types, &merges, err);
    if (status == KVB_OK) status = read_special_ids(t, f, err);
    if (status == KVB_OK) status = index_special(t, f->name, err);
    if (status == KVB_OK) status = hash_tokenizer(t, &merges, err);
    if (status == KVB_OK) *out = t;
    else tokenizer_free(t);
    return status;
}

kvb_status tokenizer_from_gguf(tokenizer **out, const gguf_file *f, kvb_error *err)
{
    return tokenizer_from_gguf_as(out, f, NULL, err);
}

void tokenizer_free(tokenizer *t)
{
    if (!t) return;
    vocabulary_free(&t->v);
    pcre2_code_free(t->words);
    free(t->special);
    free(t);
}

// Text of a token in the byte alphabet, as bytes. A character outside the alphabet (in a damaged or unusual
// vocabulary) stays as it is.
static size_t decode_token(const vocabulary *v, uint32_t id, char *out, size_t cap)
{
    const unsigned char *p = (const unsigned char *)v->text + v->start[id];
    size_t size = v->start[id + 1] - v->start[id], n = 0;
    bool raw = v->type[id] == TOKEN_CONTROL || v->type[id] == TOKEN_USER_DEFINED;
    for (size_t at = 0, step; at < size; at += step) {
        bool valid;
        step = utf8_step(p + at, size - at, &valid);
        uint32_t character = step == 2 ? (p[at] & 0x1fu) << 6 | (p[at + 1] & 0x3fu) : p[at];
        int byte = valid && step <= 2 && !raw ? char_to_byte(character) : -1;
        for (size_t i = 0; i < (byte >= 0 ? 1 : step); i++, n++)
            if (n < cap) out[n] = (char)(byte >= 0 ? byte : p[at + i]);
    }
    return n;
}

size_t tokenizer_decode(const tokenizer *t, const int32_t *ids, size_t n, char *out, size_t cap)
{
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || (uint32_t)ids[i] >= t->v.size) continue;
        bool room = total < cap;
        total += decode_token(&t->v, (uint32_t)ids[i], room ? out + total : NULL, room ? cap - total : 0);
    }
    return total;
}

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
    return t->pre->name;
}
const char *tokenizer_sha256(const tokenizer *t)
{
    return t->sha256;
}

bool tokenizer_is_control(const tokenizer *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->v.size && t->v.type[id] == TOKEN_CONTROL;
}
