// The byte alphabet, and the regular expressions that cut text into words before byte-pair encoding.
#include "profiler/tokenizer_parts.h"

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

// The character classes below are those of the Hugging Face tokenizers, written out where PCRE2 differs: its \s with
// UCP takes U+180E too, and Debian 12's PCRE2 knows Unicode 14 while the tokenizers are at 16. NEW_* are what 15 and
// 16 added (letters: among them the CJK extensions H and I); naming a character twice does no harm where the library
// knows it already.
#define SPACE "\\t-\\r\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define NEW_LETTERS                                                                                           \
    "\\x{1c89}\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}\\x{10d4a}-\\x{10d65}"      \
    "\\x{10d6f}-\\x{10d85}\\x{10ec2}-\\x{10ec4}\\x{1123f}\\x{11240}\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}" \
    "\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}\\x{113d3}\\x{11bc0}-\\x{11be0}\\x{11f02}\\x{11f04}-\\x{11f10}" \
    "\\x{11f12}-\\x{11f33}\\x{1342f}\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}"          \
    "\\x{16d40}-\\x{16d6c}\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}\\x{1e030}-\\x{1e06d}"           \
    "\\x{1e4d0}-\\x{1e4eb}\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}"
#define NEW_NUMBERS                                                                                             \
    "\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11f50}-\\x{11f59}\\x{16130}-\\x{16139}" \
    "\\x{16d70}-\\x{16d79}\\x{1ccf0}-\\x{1ccf9}\\x{1d2c0}-\\x{1d2d3}\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}"
#define LETTER "\\p{L}" NEW_LETTERS
#define NUMBER "\\p{N}" NEW_NUMBERS

// GPT-2: contractions, letters, numbers and the rest with one space in front; of a run of spaces the last is left to
// the next word.
#define GPT2                                                                                \
    "'s|'t|'re|'ve|'m|'ll|'d| ?[" LETTER "]+| ?[" NUMBER "]+| ?[^" SPACE LETTER NUMBER "]+" \
    "|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"

// SmolLM cuts every digit off first (also the 13 that Unicode 17 added) and applies GPT-2's expression between them.
// In one expression: digits stand alone, and a digit ends a run of spaces as the end of the text does.
#define DIGIT NUMBER "\\x{11de0}-\\x{11de9}\\x{16ff4}-\\x{16ff6}"
#define SMOLLM                                                                         \
    "'s|'t|'re|'ve|'m|'ll|'d| ?[" LETTER "]+|[" DIGIT "]| ?[^" SPACE LETTER DIGIT "]+" \
    "|[" SPACE "]+(?![^" SPACE DIGIT "])|[" SPACE "]+"

// Llama 3 and Qwen 2: any case of contractions, one character of any other kind in front of letters, numbers in
// groups, line ends kept with what is in front of them.
#define CASELESS(number)                                                                                        \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n" LETTER NUMBER "]?[" LETTER "]+|" number "| ?[^" SPACE LETTER NUMBER \
    "]+[\\r\\n]*"                                                                                               \
    "|[" SPACE "]*[\\r\\n]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"

static const pre_tokenizer known[] = {
    {"smollm", SMOLLM, false, false},
    {"llama-bpe", CASELESS("[" NUMBER "]{1,3}"), true, true},
    {"qwen2", CASELESS("[" NUMBER "]"), false, false},
    {"gpt-2", GPT2, false, false},
};

const pre_tokenizer *pre_tokenizer_find(gguf_string name)
{
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (gguf_string_is(name, known[i].name)) return &known[i];
    return NULL;
}

const char *pre_tokenizer_names(void)
{
    return "smollm, llama-bpe, qwen2, gpt-2";
}
