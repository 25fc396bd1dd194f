// A byte-level BPE vocabulary of 300 tokens, small enough to reason about, with the cases in which pre-tokenizers
// differ: merged digits and runs of spaces, a token that no merge reaches, parts of a Chinese character, control and
// user-defined tokens.
#pragma once
#include "gguf_build.h"

enum { TINY_ENDOFTEXT, TINY_IM_START, TINY_IM_END, TINY_FIRST_BYTE, TINY_FIRST_MERGE = TINY_FIRST_BYTE + 256 };

// In the byte alphabet, Ġ is a space, Ċ a line end, and ä½ł are the bytes of 你.
static const char *const tiny_merges[] = {
    "Ġ t", "h e",  "Ġt he", "i n",   "a n", "e r", "Ġ a",  "o n", "r e",  "an d", "Ġ and", "Ġ s",  "Ġ w",
    "a t", "i s",  "Ġ Ġ",   "ĠĠ ĠĠ", "Ċ Ċ", "1 2", "12 3", "Ġ 1", "t o",  "Ġ to", "o f",   "Ġ of", "in g",
    "e n", "Ġa n", "o r",   "l l",   "' s", "' l", "'l l", "ä ½", "ä½ ł", "å ¥",  "k e",   "ke y", "Ġ l"};
enum { TINY_MERGES = sizeof tiny_merges / sizeof *tiny_merges };

static inline size_t tiny_put_char(char *out, unsigned c)
{
    if (c < 0x80) return out[0] = (char)c, 1;
    out[0] = (char)(0xc0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3f));
    return 2;
}

// Writes a byte's character in GPT-2's byte alphabet, by its authors' definition instead of the profiler's formula.
static inline void tiny_byte_token(int byte, char out[3])
{
    int next = 256, chars[256];
    for (int b = 0; b < 256; b++) {
        int printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
        chars[b] = printable ? b : next++;
    }
    out[tiny_put_char(out, (unsigned)chars[byte])] = 0;
}

// Adds the metadata tokenizer.*, without a pre-tokenizer if `pre` is NULL. Returns the number of tokens.
static inline uint32_t tiny_vocab_build(gguf_build *b, const char *pre)
{
    static const char *const front[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    static const char *const back[] = {"Ġcache", "<tool>"}; // reached by no merge; user-defined
    uint32_t n = TINY_FIRST_MERGE + TINY_MERGES + 2;
    build_key_string(b, "tokenizer.ggml.model", "gpt2");
    if (pre) build_key_string(b, "tokenizer.ggml.pre", pre);
    build_key_array(b, "tokenizer.ggml.tokens", 8, n);
    for (int i = 0; i < TINY_FIRST_BYTE; i++) build_string(b, front[i]);
    for (int byte = 0; byte < 256; byte++) {
        char text[3];
        tiny_byte_token(byte, text);
        build_string(b, text);
    }
    for (int i = 0; i < TINY_MERGES; i++) { // both halves, without the space between them
        const char *space = strchr(tiny_merges[i], ' ');
        char text[32];
        snprintf(text, sizeof text, "%.*s%s", (int)(space - tiny_merges[i]), tiny_merges[i], space + 1);
        build_string(b, text);
    }
    for (int i = 0; i < 2; i++) build_string(b, back[i]);
    build_key_array(b, "tokenizer.ggml.token_type", 5, n);
    for (uint32_t i = 0; i < n; i++) build_u32(b, i < TINY_FIRST_BYTE ? 3 : i == n - 1 ? 4 : 1);
    build_key_array(b, "tokenizer.ggml.merges", 8, TINY_MERGES);
    for (int i = 0; i < TINY_MERGES; i++) build_string(b, tiny_merges[i]);
    build_key_u32(b, "tokenizer.ggml.bos_token_id", TINY_IM_START);
    build_key_u32(b, "tokenizer.ggml.eos_token_id", TINY_IM_END);
    build_key_u32(b, "tokenizer.ggml.unknown_token_id", TINY_ENDOFTEXT);
    build_key_u32(b, "tokenizer.ggml.padding_token_id", TINY_IM_END);
    build_key_bool(b, "tokenizer.ggml.add_bos_token", 0);
    build_key_bool(b, "tokenizer.ggml.add_space_prefix", 0);
    return n;
}
