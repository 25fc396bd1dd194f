// What the files of the tokenizer share; nobody else includes this. The interface is tokenizer.h.
#pragma once
#include "profiler/tokenizer.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// ---- vocabulary: two open-addressing tables, made once, at most half full ----

enum { TOKEN_NORMAL = 1, TOKEN_CONTROL = 3, TOKEN_USER_DEFINED = 4 }; // of tokenizer.ggml.token_type

typedef struct merge {
    uint32_t left, right; // token ids; left is UINT32_MAX in an empty slot
    uint32_t rank;        // place in the file's list: lower is merged first
    uint32_t result;      // token id
} merge;

typedef struct vocabulary {
    uint32_t size;   // tokens
    char *text;      // all tokens' text as in the file, back to back
    uint32_t *start; // [size + 1]: token i is text[start[i] .. start[i + 1])
    uint8_t *type;   // [size]
    uint32_t *slots; // [slot_mask + 1]: token id + 1, or 0
    uint32_t slot_mask;
    merge *merges; // [merge_mask + 1]
    uint32_t merge_mask;
} vocabulary;

// A zero vocabulary first takes the tokens (`types` may be NULL), then the merges. `name` is the file, for messages.
// On failure the caller still calls vocabulary_free.
kvb_status vocabulary_begin(vocabulary *v, const char *name, const gguf_array *tokens, const gguf_array *types,
                            kvb_error *err);
kvb_status vocabulary_add_merges(vocabulary *v, const char *name, const gguf_array *merges, kvb_error *err);
void vocabulary_free(vocabulary *v);
// Token id or -1. Of tokens with the same text the last one counts, as in Hugging Face's tokenizers.
int64_t vocabulary_find(const vocabulary *v, const char *text, size_t size);
const merge *vocabulary_merge(const vocabulary *v, uint32_t left, uint32_t right); // NULL when the two do not merge

// ---- text ----

// GPT-2's alphabet: every byte stands for a printable character of one or two UTF-8 bytes, below U+0144.
uint32_t byte_to_char(uint8_t byte);
int char_to_byte(uint32_t character);           // -1 when the character stands for no byte
size_t put_char(char *out, uint32_t character); // as UTF-8, below U+0800; returns 1 or 2

// ---- pre-tokenizers ----

typedef struct pre_tokenizer {
    const char *name;
    const char *pattern; // PCRE2 with UTF and UCP; matches at every position of any text
    bool ignore_merges;  // a word that is a token as a whole is that token, whatever the merges would make of it
    bool add_bos;        // when the file does not say
} pre_tokenizer;

const pre_tokenizer *pre_tokenizer_find(gguf_string name); // NULL when unknown
const char *pre_tokenizer_names(void);                     // "smollm, llama-bpe, qwen2, gpt-2"

// ---- the tokenizer ----

struct tokenizer {
    vocabulary v;
    const pre_tokenizer *pre;
    void *words;                 // pcre2_code: matches one word
    int32_t byte_id[256];        // the token of a single byte, or -1
    int32_t unknown;             // stands for a byte without a token; -1: such bytes vanish
    uint32_t *special;           // control and user-defined tokens by first byte, of each the longest first
    uint32_t special_start[257]; // special[special_start[b] .. special_start[b + 1]) begin with byte b
    int32_t bos, eos, eot;
    bool add_bos;
    char sha256[65];
};
