// Regular expressions by PCRE2, with the classes of Hugging Face's tokenizers.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "profiler/text/tokenizer_classes.h"
#include "profiler/text/tokenizer_parts.h"
#include "runtime/fail.h"
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

// A class escape, what stands for it in brackets, and what stands for it outside.
typedef struct class_escape {
    const char *escape, *inside, *outside;
} class_escape;

static const class_escape classes[] = {
    {"\\p{L}", LETTER, "[" LETTER "]"}, {"\\p{N}", NUMBER, "[" NUMBER "]"}, {"\\s", SPACE, "[" SPACE "]"},
    {"\\S", NULL, "[^" SPACE "]"},      {"\\P{L}", NULL, "[^" LETTER "]"},  {"\\P{N}", NULL, "[^" NUMBER "]"},
};

// What stands for the escape at p, and its length; NULL: itself.
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

// Writes the expression with its classes written out to `out`, or only counts where that is NULL.
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

// malloc'd; NULL without memory.
static char *translate(const char *pattern, size_t size, size_t *out_size)
{
    *out_size = write_classes(NULL, pattern, size);
    char *out = malloc(*out_size + 1);
    if (out) write_classes(out, pattern, size);
    return out;
}

kvb_status expression_compile(expression *out, const char *pattern, size_t size, bool literal, const char *where,
                              kvb_error *err)
{
    int code;
    PCRE2_SIZE offset, used = size;
    char *own = literal ? NULL : translate(pattern, size, &used);
    if (!literal && !own) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for an expression", where);
    out->code = pcre2_compile((PCRE2_SPTR)(own ? own : pattern), used,
                              PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP), &code, &offset, NULL);
    free(own);
    if (!out->code)
        return kvb_fail(err, code == PCRE2_ERROR_HEAP_FAILED ? KVB_MEMORY : KVB_UNSUPPORTED,
                        "%s: the expression '%.*s': PCRE2 error %d at %zu; is PCRE2 built with Unicode?", where,
                        (int)(size < 60 ? size : 60), pattern, code, (size_t)offset);
    (void)pcre2_jit_compile(out->code, PCRE2_JIT_COMPLETE); // without JIT the interpreter does the same, more slowly
    return KVB_OK;
}

void expression_free(expression *x)
{
    pcre2_code_free(x->code);
    x->code = NULL;
}

kvb_status matcher_open(matcher *m, kvb_error *err)
{
    pcre2_match_context *limits = pcre2_match_context_create(NULL);
    m->data = pcre2_match_data_create(1, NULL); // only the whole match is of interest
    m->limits = limits;
    if (!m->data || !limits) return kvb_fail(err, KVB_MEMORY, "not enough memory to encode the text");
    // The limits guard against patterns that explode; ours backtrack over one run of characters, however long it is.
    pcre2_set_match_limit(limits, UINT32_MAX);
    pcre2_set_heap_limit(limits, UINT32_MAX);
    return KVB_OK;
}

void matcher_close(matcher *m)
{
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->limits);
    *m = (matcher){0};
}

static int match_at(const expression *x, matcher *m, const char *text, size_t size, size_t at)
{
    // The text has been repaired, so PCRE2 need not look for broken UTF-8 again at every word.
    uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    int found = pcre2_match(x->code, (PCRE2_SPTR)text, size, at, options, m->data, m->limits);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) // the interpreter takes its stack from the heap
        found = pcre2_match(x->code, (PCRE2_SPTR)text, size, at, options | PCRE2_NO_JIT, m->data, m->limits);
    return found;
}

kvb_status expression_next(const expression *x, matcher *m, const char *text, size_t size, size_t at, size_t *begin,
                           size_t *end, kvb_error *err)
{
    *begin = *end = size;
    int found = match_at(x, m, text, size, at);
    if (found == PCRE2_ERROR_NOMATCH) return KVB_OK;
    if (found < 0)
        return kvb_fail(err,
                        found == PCRE2_ERROR_NOMEMORY || found == PCRE2_ERROR_HEAPLIMIT ? KVB_MEMORY : KVB_UNSUPPORTED,
                        "text byte %zu: an expression of the tokenizer: PCRE2 error %d", at, found);
    const PCRE2_SIZE *place = pcre2_get_ovector_pointer(m->data);
    *begin = place[0];
    *end = place[1];
    return KVB_OK;
}
