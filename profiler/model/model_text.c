// Text to the ids of a model: wrapped in its chat template where that is wished, and checked, since the tokenizer may
// know more tokens than the embedding has rows.
#include "profiler/model/model.h"
#include "profiler/text/utf8.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Tokens that were added behind a vocabulary have no row where nobody has made the embedding longer; transformers'
// conversion from GGUF adds such ones. They do no harm until a text holds one.
static kvb_status check_rows(const model *m, const int32_t *ids, size_t n, kvb_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= 0 && (uint32_t)ids[i] < m->config.vocabulary) continue;
        char text[33];
        size_t size = tokenizer_decode(m->tokens, &ids[i], 1, text, sizeof text - 1);
        text[size < sizeof text ? size : sizeof text - 1] = '\0';
        return kvb_fail(err, KVB_ARGUMENT,
                        "token %zu of the text is \"%s\" with id %d, but the embedding has %u rows: the tokenizer was "
                        "given tokens that the model does not know; leave it out of the text",
                        i, text, ids[i], m->config.vocabulary);
    }
    return KVB_OK;
}

// Zeros, a token for four bytes.
static kvb_status count_tokens(size_t size, int32_t **ids, size_t *n, kvb_error *err)
{
    enum { BYTES_PER_TOKEN = 4 };
    *n = size / BYTES_PER_TOKEN + 1;
    *ids = calloc(*n, sizeof **ids);
    return *ids ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %zu tokens", *n);
}

kvb_status model_use_chat(model *m, kvb_error *err)
{
    if (!m->tokens)
        return kvb_fail(err, KVB_ARGUMENT,
                        "--chat wraps texts, but only token ids are given, which are taken as they are");
    chat_frame_free(&m->chat);
    return chat_frame_of(&m->chat, m->tokens, m->config.name, err);
}

bool model_begins_with_bos(const model *m)
{
    return m->special.bos >= 0 && (m->chat.kind ? m->chat.bos : m->special.add_bos);
}

static kvb_status encode_framed(const model *m, const char *front, const char *text, size_t size, const char *back,
                                int32_t **ids, size_t *n, kvb_error *err)
{
    if (!m->tokens) return count_tokens(size, ids, n, err);
    kvb_status status = tokenizer_encode_framed(m->tokens, front, text, size, back, m->special_text, ids, n, err);
    if (status == KVB_OK) status = check_rows(m, *ids, *n, err);
    if (status == KVB_OK) return KVB_OK;
    free(*ids);
    *ids = NULL;
    *n = 0;
    return status;
}

kvb_status model_encode(const model *m, text_part part, const char *text, size_t size, int32_t **ids, size_t *n,
                        kvb_error *err)
{
    const chat_frame *f = &m->chat;
    if (!f->kind || part == TEXT_ALONE) return encode_framed(m, "", text, size, "", ids, n, err);
    if (part == TEXT_CONTEXT) {
        size_t left_out = f->trim ? utf8_spaces_before(text, size) : 0;
        return encode_framed(m, f->front, text + left_out, size - left_out, "", ids, n, err);
    }
    if (f->trim) size -= utf8_spaces_behind(text, size);
    return encode_framed(m, "", text, size, f->back, ids, n, err);
}

kvb_status model_encode_question(const model *m, const char *text, const char *answer_prefix, int32_t **ids, size_t *n,
                                 kvb_error *err)
{
    size_t size = strlen(text), room = size + strlen(answer_prefix) + 1 + (m->chat.kind ? strlen(m->chat.back) : 0);
    char *joined = malloc(room);
    if (!joined) return kvb_fail(err, KVB_MEMORY, "no memory for a question of %zu bytes", size);
    kvb_status status;
    if (m->chat.kind) {
        if (m->chat.trim) size -= utf8_spaces_behind(text, size);
        snprintf(joined, room, "%s%s", m->chat.back, answer_prefix);
        status = encode_framed(m, "", text, size, joined, ids, n, err);
    } else {
        snprintf(joined, room, "%s%s", text, answer_prefix);
        status = encode_framed(m, "", joined, strlen(joined), "", ids, n, err);
    }
    free(joined);
    return status;
}
