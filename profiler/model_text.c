// Text to the ids of a model: the tokenizer may know more tokens than the embedding has rows.
#include "profiler/model.h"
#include "runtime/fail.h"
#include <stdlib.h>

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

kvb_status model_encode(const model *m, const char *text, size_t size, int32_t **ids, size_t *n, kvb_error *err)
{
    if (!m->tokens) return count_tokens(size, ids, n, err);
    kvb_status status = tokenizer_encode(m->tokens, text, size, false, ids, n, err);
    if (status == KVB_OK) status = check_rows(m, *ids, *n, err);
    if (status == KVB_OK) return KVB_OK;
    free(*ids);
    *ids = NULL;
    *n = 0;
    return status;
}
