// Added tokens: texts that are found before anything else is done to a text, and never cut.
#include "profiler/text/tokenizer_parts.h"
#include "profiler/text/utf8.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// A token that is not UTF-8 cannot occur in repaired text; a match inside of a character would cut it.
static bool can_occur(const char *text, size_t size)
{
    bool valid = size > 0 && size <= UINT32_MAX;
    for (size_t at = 0; at < size && valid;) at += utf8_step((const unsigned char *)text + at, size - at, &valid);
    return valid;
}

kvb_status added_put(added_index *x, uint32_t id, const char *text, size_t size, uint8_t flags, kvb_error *err)
{
    if (!can_occur(text, size)) return KVB_OK;
    if (x->n == x->room) {
        uint32_t room = x->room ? 2 * x->room : 64;
        added_token *grown = realloc(x->tokens, room * sizeof *grown);
        if (!grown) return kvb_fail(err, KVB_MEMORY, "not enough memory for %u added tokens", room);
        x->tokens = grown;
        x->room = room;
    }
    x->tokens[x->n++] = (added_token){id, text, (uint32_t)size, flags};
    return KVB_OK;
}

// The text is kept by the index.
static kvb_status keep_text(added_index *x, const char *text, size_t size, char **copy, kvb_error *err)
{
    char **grown = realloc(x->owned, (x->n_owned + 1) * sizeof *grown);
    if (grown) x->owned = grown;
    *copy = grown ? malloc(size + 1) : NULL;
    if (!*copy) return kvb_fail(err, KVB_MEMORY, "not enough memory for an added token");
    memcpy(*copy, text, size);
    x->owned[x->n_owned++] = *copy;
    return KVB_OK;
}

kvb_status added_put_normalised(added_index *x, const normal_list *normal, uint32_t id, const char *text, size_t size,
                                uint8_t flags, kvb_error *err)
{
    char *owned = NULL, *copy = NULL;
    matcher m = {0};
    kvb_status status = matcher_open(&m, err);
    if (status == KVB_OK) status = normal_apply(normal, &m, true, &text, &size, &owned, err);
    if (status == KVB_OK) status = keep_text(x, text, size, &copy, err);
    if (status == KVB_OK) status = added_put(x, id, copy, size, flags, err);
    matcher_close(&m);
    free(owned);
    return status;
}

static int compare(const void *a, const void *b)
{
    const added_token *x = a, *y = b;
    unsigned char first_x = (unsigned char)x->text[0], first_y = (unsigned char)y->text[0];
    if (first_x != first_y) return first_x < first_y ? -1 : 1;
    if (x->size != y->size) return x->size > y->size ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

void added_sort(added_index *x)
{
    if (x->n) qsort(x->tokens, x->n, sizeof *x->tokens, compare);
    for (uint32_t i = 0, first = 0; first <= 256; first++) {
        while (i < x->n && (unsigned char)x->tokens[i].text[0] < first) i++;
        x->first[first] = first == 256 ? x->n : i;
    }
}

void added_free(added_index *x)
{
    for (size_t i = 0; i < x->n_owned; i++) free(x->owned[i]);
    free(x->owned);
    free(x->tokens);
    *x = (added_index){0};
}
