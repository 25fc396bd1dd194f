// kvbudget inspect --answers: what was asked and answered in a record, as text.
#include "tools/report/inspect_answers.h"
#include "formats/need.h"
#include "formats/record.h"
#include "profiler/text/tokenizer.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>
#include <strings.h>

// Ids as text that JSON can hold: broken UTF-8 becomes U+FFFD, NUL a space. The caller frees.
static char *decode_as_text(const tokenizer *t, const int32_t *ids, size_t n)
{
    size_t size = tokenizer_decode(t, ids, n, NULL, 0), valid_size = 0;
    const char *valid = NULL;
    char *owned = NULL, *bytes = need(size + 1, 1, "characters");
    tokenizer_decode(t, ids, n, bytes, size);
    utf8_repair(bytes, size, &valid, &valid_size, &owned);
    char *text = need(valid_size + 1, 1, "characters");
    for (size_t i = 0; i < valid_size; i++) text[i] = valid[i] ? valid[i] : ' ';
    free(owned);
    free(bytes);
    return text;
}

typedef kvb_status id_reader(record *r, size_t context, size_t question, int32_t *out, kvb_error *err);

static kvb_status add_answer(cJSON *to, const char *key, id_reader *read, record *r, size_t i, size_t q, uint32_t n,
                             const tokenizer *t, kvb_error *err)
{
    int32_t *ids = need(n, sizeof *ids, "token ids");
    kvb_status status = read(r, i, q, ids, err);
    if (status == KVB_OK) {
        char *text = decode_as_text(t, ids, n);
        cJSON_AddStringToObject(to, key, text);
        free(text);
    }
    free(ids);
    return status;
}

static kvb_status add_context(cJSON *list, record *r, size_t i, const tokenizer *t, kvb_error *err)
{
    const record_context_info *c = record_context(r, i);
    kvb_status status = KVB_OK;
    for (uint32_t q = 0; q < c->n_questions && status == KVB_OK; q++) {
        cJSON *one = cJSON_CreateObject();
        cJSON_AddItemToArray(list, one);
        cJSON_AddStringToObject(one, "context", c->id);
        cJSON_AddNumberToObject(one, "question", c->questions[q].number);
        cJSON_AddNumberToObject(one, "n_queries", c->questions[q].n_queries);
        status = add_answer(one, "asked", record_read_suffix, r, i, q, c->questions[q].n_suffix, t, err);
        if (status == KVB_OK)
            status = add_answer(one, "answered", record_read_answer, r, i, q, c->questions[q].n_answer, t, err);
    }
    return status;
}

// Ids mean nothing to another tokenizer.
static kvb_status check_tokenizer(const record *r, const char *path, const tokenizer *t, const char *model,
                                  kvb_error *err)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(record_attributes(r), "tokenizer_sha256");
    const char *said = cJSON_IsString(item) ? item->valuestring : "";
    if (!*said || strcasecmp(said, tokenizer_sha256(t)) == 0) return KVB_OK;
    return kvb_fail(
        err, KVB_MISMATCH,
        "%s was made with the tokenizer of SHA-256 %.16s..., %s has that of %.16s...; give the model of the "
        "record, and --pre where it was profiled with it",
        path, said, model, tokenizer_sha256(t));
}

kvb_status inspect_answers(cJSON *doc, const char *path, const char *model, const char *pre, kvb_error *err)
{
    record *r = NULL;
    weights *w = NULL;
    tokenizer *t = NULL;
    kvb_status status = record_open(&r, path, err);
    if (status == KVB_OK) status = weights_open(&w, model, err);
    if (status == KVB_OK) status = tokenizer_open(&t, w, pre, err);
    if (status == KVB_OK) status = check_tokenizer(r, path, t, model, err);
    cJSON *list = cJSON_AddArrayToObject(doc, "answers");
    for (size_t i = 0; status == KVB_OK && i < record_context_count(r); i++) status = add_context(list, r, i, t, err);
    tokenizer_free(t);
    weights_close(w);
    record_close(r);
    return status;
}
