// Internals shared by the tokenizer's files. The public interface is tokenizer.h.
#pragma once
#include "profiler/text/tokenizer.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Values of tokenizer.ggml.token_type. Tokens without a text of their own are never found in a text.
enum {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_USER_DEFINED = 4,
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6
};

typedef struct merge {
    uint32_t left, right; // token ids; left is UINT32_MAX in an empty slot
    uint32_t rank;        // lower is merged first
    uint32_t result;      // token id
} merge;

// Two open-addressing tables, made once, at most half full.
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

// Fill a zero vocabulary in this order: reserve (n tokens of `bytes` bytes in all), put or skip every id, ascending,
// reserve_merges, put_merge. `name` is the file, for messages. After a failure the caller still frees the tokenizer.
kvb_status vocabulary_reserve(vocabulary *v, const char *name, uint64_t n, uint64_t bytes, kvb_error *err);
void vocabulary_put(vocabulary *v, uint32_t id, const char *text, size_t size, uint8_t type);
void vocabulary_skip(vocabulary *v, uint32_t id); // an id that no token has
kvb_status vocabulary_reserve_merges(vocabulary *v, const char *name, uint64_t n, kvb_error *err);
// Adds a merge of two tokens into a third, by their texts; returns false if one of the three is not a token. A repeated
// pair gets the last one's rank, as in Hugging Face's tokenizers.
bool vocabulary_put_merge(vocabulary *v, const char *left, size_t left_size, const char *right, size_t right_size,
                          uint32_t rank);
// Returns the token id, or -1. Of tokens with the same text the last one is used, as in Hugging Face's tokenizers.
int64_t vocabulary_find(const vocabulary *v, const char *text, size_t size);
static inline uint32_t token_bytes(const vocabulary *v, uint32_t id)
{
    return v->start[id + 1] - v->start[id];
}

#define LOW_LINE "\xe2\x96\x81" // U+2581, which stands for a space in SentencePiece's vocabularies

typedef struct pre_tokenizer { // expressions: tokenizer_expression.c
    const char *name;
    const char *pattern; // PCRE2 with UTF and UCP; matches at every position of any text
    bool ignore_merges;  // if a whole word is a token, use it, whatever the merges would give
    bool add_bos;        // when the file does not say
} pre_tokenizer;

const pre_tokenizer *pre_tokenizer_find(gguf_string name); // NULL when unknown
const char *pre_tokenizer_names(void);                     // of the first of each kind, with commas between
extern const char gpt2_pattern[];                          // of ByteLevel{use_regex} in tokenizer.json
extern const char digit_pattern[];                         // of Digits: one number

typedef struct expression {
    void *code; // pcre2_code
} expression;

// `literal`: the pattern is the text itself. Else \p{L}, \p{N}, \s and \S mean what they mean in Hugging Face's
// tokenizers, whose Unicode is newer than Debian's PCRE2. `where` names file and place.
kvb_status expression_compile(expression *out, const char *pattern, size_t size, bool literal, const char *where,
                              kvb_error *err);
void expression_free(expression *x);

// The state for matching one text on one thread: memory, and a limit on work in proportion to the text.
typedef struct matcher matcher;
matcher *matcher_open(size_t text_size);
void matcher_close(matcher *m);
// Finds the next non-empty match at or after `at`; *begin = *end = size if there is none. Fails with KVB_UNSUPPORTED if
// the expression backtracks longer, or needs more memory, than the text's length allows.
kvb_status expression_next(const expression *x, matcher *m, const char *text, size_t size, size_t at, size_t *begin,
                           size_t *end, kvb_error *err);

typedef enum normal_kind { NORMAL_NFC, NORMAL_PREPEND, NORMAL_REPLACE } normal_kind;
typedef struct normal_step { // what happens to a text before its words are merged
    normal_kind kind;
    expression pattern; // NORMAL_REPLACE
    char *text;         // what is prepended, or what replaces
    size_t size;
    bool unless_there,
        first_only; // NORMAL_PREPEND: not if the text begins with it already; only at the whole text's beginning
} normal_step;

// What happens to the separators that an expression finds: SplitDelimiterBehavior in Hugging Face's tokenizers.
typedef enum cut_behaviour { CUT_REMOVED, CUT_ISOLATED, CUT_PREVIOUS, CUT_NEXT, CUT_CONTIGUOUS } cut_behaviour;
typedef struct cut_step {
    expression separator;
    cut_behaviour behaviour;
    bool invert; // what is not found is the separator
} cut_step;

enum { STEPS_MAX = 16 };
typedef struct normal_list {
    normal_step steps[STEPS_MAX];
    size_t n;
} normal_list;

enum { ADDED_LSTRIP = 1, ADDED_RSTRIP = 2 };
typedef struct added_token { // found in the text before anything else is done
    uint32_t id;
    const char *text; // belongs to the vocabulary, or to added_index.owned
    uint32_t size;
    uint8_t flags;
} added_token;

typedef struct added_index {
    added_token *tokens; // [n] by first byte, longer ones first
    uint32_t n;
    uint32_t first[257]; // tokens[first[b] .. first[b + 1]) begin with byte b
    char **owned;        // [n_owned] texts
    size_t n_owned;
} added_index;

// Adds a token; call added_sort after the last one. Texts that are empty or not UTF-8 can never match and are left out.
void added_put(added_index *x, uint32_t id, const char *text, size_t size, uint8_t flags);
// The same for a token that is searched for in normalised text: `normal` is applied to its text too.
kvb_status added_put_normalised(added_index *x, const normal_list *normal, uint32_t id, const char *text, size_t size,
                                uint8_t flags, kvb_error *err);
void added_sort(added_index *x);

struct tokenizer {
    vocabulary v;
    char *pre;                        // name of the expression, or of the kind
    added_index raw, normalised;      // looked for before and after `normal`
    normal_list normal, before_words; // for text between `raw` tokens, and for its pieces between `normalised` ones
    cut_step cuts[STEPS_MAX];
    size_t n_cuts;
    bool byte_level;    // words are bytes in GPT-2's alphabet; else characters
    bool byte_fallback; // a character without a token becomes its bytes' tokens
    bool ignore_merges, fuse_unknown;
    bool strip_first;     // decoding takes one space off the front
    int32_t byte_id[256]; // the token of a single byte, or -1
    int32_t unknown;      // stands for what has no token; -1: that is left out
    special_ids special;
    int32_t *ends; // [n_ends] all that end an answer
    size_t n_ends;
    char *chat_template; // NULL: none
    char sha256[65];
};

tokenizer *tokenizer_new(void); // all ids -1
// Fills byte_id from the vocabulary: of the byte alphabet, or "<0x00>" to "<0xFF>" with byte_fallback.
void tokenizer_find_bytes(tokenizer *t);
// Adds an id to those that end an answer, unless it is -1 or already there.
void tokenizer_add_end(tokenizer *t, int32_t id);
