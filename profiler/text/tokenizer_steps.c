// What happens to a text before its words are merged: normalisation, then cutting, each a list of steps as
// tokenizer.json has them.
#include "formats/need.h"
#include "profiler/text/tokenizer_parts.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

typedef struct buffer {
    char *text;
    size_t size, room;
} buffer;

static void append(buffer *b, const char *text, size_t size)
{
    if (size > b->room - b->size) {
        b->room = b->size + size + b->room / 2 + 64;
        b->text = need_more(b->text, b->room, 1, "bytes of normalised text");
    }
    if (size) memcpy(b->text + b->size, text, size);
    b->size += size;
}

// ---- normalisation ----

static kvb_status compose(const char *text, size_t size, buffer *out, kvb_error *err)
{
    utf8proc_uint8_t *composed = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)size, &composed,
                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (n < 0) {
        free(composed);
        return kvb_fail(err, KVB_ARGUMENT, "text to NFC: %s", utf8proc_errmsg(n));
    }
    *out = (buffer){(char *)composed, (size_t)n, (size_t)n};
    return KVB_OK;
}

static kvb_status replace(const normal_step *step, matcher *m, const char *text, size_t size, size_t most, buffer *out,
                          kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t at = 0, begin, end; at < size && status == KVB_OK; at = end) {
        status = expression_next(&step->pattern, m, text, size, at, &begin, &end, err);
        if (status != KVB_OK) break;
        append(out, text + at, begin - at);
        if (begin < end) append(out, step->text, step->size);
        if (out->size > most)
            status = kvb_fail(err, KVB_UNSUPPORTED,
                              "the tokenizer's normalizer makes more than %zu bytes of a text; give token ids instead "
                              "of text",
                              most);
    }
    return status;
}

static bool is_ascii(const char *text, size_t size)
{
    unsigned char all = 0;
    for (size_t i = 0; i < size; i++) all |= (unsigned char)text[i];
    return all < 0x80;
}

static bool begins_with(const char *text, size_t size, const normal_step *step)
{
    return size >= step->size && memcmp(text, step->text, step->size) == 0;
}

// Whether the step leaves every text of this kind as it is.
static bool is_idle(const normal_step *step, bool first, const char *text, size_t size)
{
    if (size == 0) return true;
    if (step->kind == NORMAL_NFC) return is_ascii(text, size);
    return step->kind == NORMAL_PREPEND &&
           ((step->first_only && !first) || (step->unless_there && begins_with(text, size, step)));
}

kvb_status normal_apply(const normal_list *list, matcher *m, bool first, const char **text, size_t *size, char **owned,
                        kvb_error *err)
{
    size_t most = 64 * *size + (1 << 20); // no honest steps make a text so much longer; hostile ones would fill memory
    kvb_status status = KVB_OK;
    *owned = NULL;
    for (size_t i = 0; i < list->n && status == KVB_OK; i++) {
        const normal_step *step = &list->steps[i];
        if (is_idle(step, first, *text, *size)) continue;
        buffer out = {0};
        if (step->kind == NORMAL_NFC) status = compose(*text, *size, &out, err);
        else if (step->kind == NORMAL_REPLACE) status = replace(step, m, *text, *size, most, &out, err);
        else append(&out, step->text, step->size), append(&out, *text, *size);
        free(*owned);
        *owned = out.text;
        *text = out.text ? out.text : "";
        *size = out.size;
    }
    return status;
}

void normal_free(normal_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        expression_free(&list->steps[i].pattern);
        free(list->steps[i].text);
    }
    list->n = 0;
}

// ---- cutting ----

typedef struct cutter {
    const cut_step *steps;
    size_t n;
    matcher *m;
    word_action *action;
    void *context;
    kvb_error *err;
} cutter;

// A piece that waits for its neighbour: what stands behind may join it.
typedef struct waiting {
    size_t begin, end;
    bool there, separator;
} waiting;

static kvb_status cut_piece(const cutter *c, size_t step, const char *text, size_t size);

static kvb_status let_go(const cutter *c, size_t step, const char *text, waiting *w)
{
    bool drop = !w->there || w->begin == w->end || (w->separator && c->steps[step].behaviour == CUT_REMOVED);
    w->there = false;
    return drop ? KVB_OK : cut_piece(c, step + 1, text + w->begin, w->end - w->begin);
}

static bool joins(cut_behaviour how, const waiting *w, bool separator)
{
    if (!w->there) return false;
    if (how == CUT_CONTIGUOUS) return w->separator == separator;
    return (how == CUT_PREVIOUS && !w->separator && separator) || (how == CUT_NEXT && w->separator && !separator);
}

// One more piece of the step, in order.
static kvb_status put_piece(const cutter *c, size_t step, const char *text, waiting *w, size_t begin, size_t end,
                            bool found)
{
    if (begin == end) return KVB_OK;
    bool separator = found != c->steps[step].invert;
    if (joins(c->steps[step].behaviour, w, separator)) {
        w->end = end;
        // What found its neighbour waits no longer; equals may be many.
        return c->steps[step].behaviour == CUT_CONTIGUOUS ? KVB_OK : let_go(c, step, text, w);
    }
    kvb_status status = let_go(c, step, text, w);
    *w = (waiting){begin, end, true, separator};
    return status;
}

static kvb_status cut_piece(const cutter *c, size_t step, const char *text, size_t size)
{
    if (step == c->n) return c->action(c->context, text, size);
    waiting w = {0};
    kvb_status status = KVB_OK;
    for (size_t at = 0, begin, end; at < size && status == KVB_OK; at = end) {
        status = expression_next(&c->steps[step].separator, c->m, text, size, at, &begin, &end, c->err);
        if (status == KVB_OK) status = put_piece(c, step, text, &w, at, begin, false);
        if (status == KVB_OK) status = put_piece(c, step, text, &w, begin, end, true);
    }
    return status == KVB_OK ? let_go(c, step, text, &w) : status;
}

kvb_status cut_apply(const cut_step *steps, size_t n, matcher *m, const char *text, size_t size, word_action *action,
                     void *context, kvb_error *err)
{
    cutter c = {steps, n, m, action, context, err};
    return size ? cut_piece(&c, 0, text, size) : KVB_OK;
}
