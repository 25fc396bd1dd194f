// Regular expressions by PCRE2 with the classes of Hugging Face's tokenizers, and the expressions that GGUF files name.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "formats/need.h"
#include "profiler/text/tokenizer_parts.h"
#include "runtime/fail.h"
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// ---- Character classes ----
//
// The contents of bracketed classes, as Hugging Face's tokenizers define them, written out where PCRE2 differs: its \s
// with UCP also matches U+180E, and Debian 12's PCRE2 knows Unicode 14 while the tokenizers are at 16. NEW_* are what
// 15 and 16 added (letters: among them the CJK extensions H and I); if the library knows a character already, naming it
// twice does no harm.

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

// ---- Expressions that have names ----

// GPT-2: contractions, letters, numbers and the rest with one space in front; the last of a run of spaces is left to
// the next word.
#define GPT2                                                                                \
    "'s|'t|'re|'ve|'m|'ll|'d| ?[" LETTER "]+| ?[" NUMBER "]+| ?[^" SPACE LETTER NUMBER "]+" \
    "|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"

// SmolLM cuts every digit off first (also the 13 that Unicode 17 added) and applies GPT-2's expression between them.
// As one expression: every digit is a word, and a digit ends a run of spaces as the end of the text does.
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

// Messages list the first name of each kind; the others are llama.cpp's names for models of the same kind.
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

// ---- Compiling ----

// A class escape, what replaces it in brackets, and what replaces it outside.
typedef struct class_escape {
    const char *escape, *inside, *outside;
} class_escape;

static const class_escape classes[] = {
    {"\\p{L}", LETTER, "[" LETTER "]"}, {"\\p{N}", NUMBER, "[" NUMBER "]"}, {"\\s", SPACE, "[" SPACE "]"},
    {"\\S", NULL, "[^" SPACE "]"},      {"\\P{L}", NULL, "[^" LETTER "]"},  {"\\P{N}", NULL, "[^" NUMBER "]"},
};

// Returns the text that replaces the escape at p, and sets *length to the escape's; NULL if there is none to replace.
static const char *class_at(const char *p, size_t n, bool inside, size_t *length)
{
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        size_t size = strlen(classes[i].escape);
        if (size > n || memcmp(p, classes[i].escape, size) != 0) continue;
        *length = size;
        return inside ? classes[i].inside : classes[i].outside;
    }
    return NULL;
}

// Writes the expression to `out` with its classes written out, unless that is NULL. Returns its length.
static size_t write_classes(char *out, const char *pattern, size_t size)
{
    size_t used = 0;
    bool inside = false;
    for (size_t at = 0, step; at < size; at += step) {
        const char *text = pattern + at;
        size_t length;
        step = 1;
        const char *other = class_at(pattern + at, size - at, inside, &step);
        if (other) {
            text = other;
            length = strlen(other);
        } else {
            step = pattern[at] == '\\' && at + 1 < size ? 2 : 1;
            length = step;
            if (pattern[at] == '[') inside = true;
            if (pattern[at] == ']') inside = false;
        }
        if (out) memcpy(out + used, text, length);
        used += length;
    }
    return used;
}

// Returns PCRE2's message for an error code.
static const char *pcre2_words(int code, char text[160])
{
    if (pcre2_get_error_message(code, (PCRE2_UCHAR *)text, 160) < 0) snprintf(text, 160, "PCRE2 error %d", code);
    return text;
}

kvb_status expression_compile(expression *out, const char *pattern, size_t size, bool literal, const char *where,
                              kvb_error *err)
{
    int code;
    PCRE2_SIZE offset, used = literal ? size : write_classes(NULL, pattern, size);
    char *own = need(used + 1, 1, "bytes of an expression"), words[160];
    if (literal) memcpy(own, pattern, size);
    else write_classes(own, pattern, size);
    out->code =
        pcre2_compile((PCRE2_SPTR)own, used, PCRE2_USE_OFFSET_LIMIT | PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP),
                      &code, &offset, NULL);
    free(own);
    if (!out->code)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: the expression '%.*s': PCRE2: %s, at byte %zu", where,
                        (int)(size < 60 ? size : 60), pattern, pcre2_words(code, words), (size_t)offset);
    (void)pcre2_jit_compile(out->code, PCRE2_JIT_COMPLETE); // without JIT the interpreter does the same, more slowly
    return KVB_OK;
}

void expression_free(expression *x)
{
    pcre2_code_free(x->code);
    x->code = NULL;
}

// ---- Matching ----
//
// An expression of a model's files may backtrack without end, so its work is bounded by the text's length. PCRE2 counts
// steps for each place where a match may begin. FEW of them are free: honest words need fewer, and there are no more
// places than bytes. If they are not enough, the place is tried again with twice as many, paid from an allowance for
// the whole text; a word of 10 MB needs some 20 of its 640 million steps. PCRE2 does not count runs of single
// characters, such as [^b]*, whose work may grow with the square of the length. Processor time limits these; honest
// expressions take less than a hundredth of it.

enum { FEW = 1000, STEPS_PER_BYTE = 64, STEPS_LEAST = 1 << 20 };
enum { SECONDS_LEAST = 10, BYTES_PER_SECOND = 50000, CALLS_PER_LOOK = 64 };
// Bytes of memory for backtracking; without JIT it takes INTERPRETED times as much.
enum { STACK_PER_BYTE = 64, STACK_LEAST = 1 << 20, INTERPRETED = 4 };

struct matcher {
    pcre2_match_data *data;
    pcre2_match_context *limits;
    pcre2_jit_stack *stack; // NULL: the machine's own, 32 KiB, which is faster and nearly always enough
    uint64_t allowed;       // steps left
    size_t stack_bytes;
    uint64_t calls;
    double deadline; // of this thread's processor time, in seconds
};

static double thread_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *need_block(size_t size, void *unused)
{
    (void)unused;
    return need_more(NULL, size, 1, "bytes to match a text");
}

static void free_block(void *block, void *unused)
{
    (void)unused;
    free(block);
}

matcher *matcher_open(size_t text_size)
{
    matcher *m = need(1, sizeof *m, "matchers");
    pcre2_general_context *memory = pcre2_general_context_create(need_block, free_block, NULL);
    *m = (matcher){.data = pcre2_match_data_create(1, memory), // only the whole match is of interest
                   .limits = pcre2_match_context_create(memory),
                   .allowed = STEPS_LEAST + (uint64_t)STEPS_PER_BYTE * text_size,
                   .stack_bytes = STACK_LEAST + (size_t)STACK_PER_BYTE * text_size,
                   .deadline = thread_seconds() + SECONDS_LEAST + (double)text_size / BYTES_PER_SECOND};
    pcre2_general_context_free(memory);
    pcre2_set_depth_limit(m->limits, UINT32_MAX); // the heap's limit, in KiB, bounds it
    pcre2_set_heap_limit(m->limits, (uint32_t)(INTERPRETED * m->stack_bytes / 1024));
    return m;
}

void matcher_close(matcher *m)
{
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->limits);
    pcre2_jit_stack_free(m->stack);
    free(m);
}

// Finds a match that begins at `at` or later, but not after `last`. Returns what pcre2_match returns.
static int match_at(const expression *x, matcher *m, const char *text, size_t size, size_t at, size_t last,
                    uint32_t steps)
{
    // The text has been repaired, so PCRE2 need not look for broken UTF-8 again at every word.
    uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    pcre2_set_match_limit(m->limits, steps);
    pcre2_set_offset_limit(m->limits, last);
    int found = pcre2_match(x->code, (PCRE2_SPTR)text, size, at, options, m->data, m->limits);
    if (found != PCRE2_ERROR_JIT_STACKLIMIT || m->stack) return found;
    m->stack = pcre2_jit_stack_create(STACK_LEAST, m->stack_bytes, NULL); // NULL: the next try fails like this one
    pcre2_jit_stack_assign(m->limits, NULL, m->stack);
    return pcre2_match(x->code, (PCRE2_SPTR)text, size, at, options, m->data, m->limits);
}

// Tries one place after another, each with more and more steps.
static int match_slowly(const expression *x, matcher *m, const char *text, size_t size, size_t at)
{
    int found = PCRE2_ERROR_NOMATCH;
    for (; at < size && found == PCRE2_ERROR_NOMATCH; at++) {
        if (((unsigned char)text[at] & 0xc0) == 0x80) continue; // inside a character
        uint64_t steps = FEW;
        found = match_at(x, m, text, size, at, at, FEW);
        while (found == PCRE2_ERROR_MATCHLIMIT && steps <= m->allowed && steps < UINT32_MAX / 2) {
            m->allowed -= steps;
            steps *= 2;
            found = match_at(x, m, text, size, at, at, (uint32_t)steps);
        }
    }
    return found;
}

kvb_status expression_next(const expression *x, matcher *m, const char *text, size_t size, size_t at, size_t *begin,
                           size_t *end, kvb_error *err)
{
    char words[160];
    *begin = *end = size;
    int found = match_at(x, m, text, size, at, PCRE2_UNSET, FEW);
    if (found == PCRE2_ERROR_MATCHLIMIT) found = match_slowly(x, m, text, size, at);
    if (found == PCRE2_ERROR_NOMATCH) return KVB_OK;
    if (m->calls++ % CALLS_PER_LOOK == 0 && thread_seconds() > m->deadline) found = PCRE2_ERROR_MATCHLIMIT;
    if (found < 0)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "text byte %zu: an expression of the tokenizer cannot cut the text here: PCRE2: %s; give token "
                        "ids instead of text, or a text without such a long run",
                        at, pcre2_words(found, words));
    const PCRE2_SIZE *place = pcre2_get_ovector_pointer(m->data);
    *begin = place[0];
    *end = place[1];
    return KVB_OK;
}
