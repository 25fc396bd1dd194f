// The byte alphabet, and the regular expressions that cut text into words before byte-pair encoding.
#include "profiler/text/tokenizer_classes.h"
#include "profiler/text/tokenizer_parts.h"

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

// o200k (GPT-4o): words of upper and lower case letters with marks, contractions behind them.
#define UPPER "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}"
#define LOWER "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}"
#define CASED(contraction, number)                                                                                   \
    "[^\\r\\n" LETTER NUMBER "]?[" UPPER "]*[" LOWER "]+" contraction "|[^\\r\\n" LETTER NUMBER "]?[" UPPER          \
    "]+[" LOWER "]*" contraction "|" number "| ?[^" SPACE LETTER NUMBER "]+[\\r\\n/]*|[" SPACE "]*[\\r\\n]+|[" SPACE \
    "]+(?![^" SPACE "])|[" SPACE "]+"
#define O200K CASED("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "[" NUMBER "]{1,3}")
#define TEKKEN CASED("", "[" NUMBER "]")

// The first of each kind is the one that messages name; the others are llama.cpp's names for models of its kind.
static const pre_tokenizer known[] = {
    {"smollm", SMOLLM, false, false},
    {"llama-bpe", CASELESS("[" NUMBER "]{1,3}"), true, true},
    {"qwen2", CASELESS("[" NUMBER "]"), false, false},
    {"gpt-2", GPT2, false, false},
    {"gpt-4o", O200K, false, false},
    {"tekken", TEKKEN, true, true},
    {"dbrx", CASELESS("[" NUMBER "]{1,3}"), false, false},
    // --- further names ---
    {"starcoder", SMOLLM, false, false},
    {"refact", SMOLLM, false, false},
    {"command-r", SMOLLM, false, false},
    {"exaone", SMOLLM, false, false},
    {"llama3", CASELESS("[" NUMBER "]{1,3}"), true, true},
    {"llama-v3", CASELESS("[" NUMBER "]{1,3}"), true, true},
    {"smaug-bpe", CASELESS("[" NUMBER "]{1,3}"), false, false},
    {"glm4", CASELESS("[" NUMBER "]{1,3}"), false, false},
    {"chatglm-bpe", CASELESS("[" NUMBER "]{1,3}"), false, false},
    {"deepseek-r1-qwen", CASELESS("[" NUMBER "]"), false, false},
    {"olmo", GPT2, false, false},
    {"phi-2", GPT2, false, false},
};

const char gpt2_pattern[] = GPT2;
const char digit_pattern[] = "[" DIGIT "]";

const pre_tokenizer *pre_tokenizer_find(gguf_string name)
{
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (gguf_string_is(name, known[i].name)) return &known[i];
    return NULL;
}

const char *pre_tokenizer_names(void)
{
    return "smollm, llama-bpe, qwen2, gpt-2, gpt-4o, tekken, dbrx";
}
