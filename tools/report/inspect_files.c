#include "tools/report/inspect_files.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/record.h"
#include "profiler/text/model_text.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

// ---- A learned ranking ----------------------------------------------------------------------------------------------

// What moves a head's scores: the features, with layer_mean their means over the layer's heads, and recency.
static uint32_t count_effects(const kvb_ranking_info *r)
{
    return (r->layer_mean ? 2 : 1) * r->n_features + 1;
}

// The effect of a feature is |w + w'|, what one deviation upwards does; that of a mean |u|, that of recency |w_r|,
// since log(T - j) has a deviation of 1 whatever T. `head` is l * G + g.
static double effect_of(const kvb_ranking_info *r, size_t head, uint32_t i)
{
    const double *w = r->weights + head * r->n_columns;
    return i < r->n_features ? fabs(w[2 * i] + w[2 * i + 1]) : fabs(w[r->n_features + i]);
}

// The mean of every effect over the heads that are ranked: those of layers with a window have weights of 0.
static void add_effects(cJSON *doc, const kvb_ranking_info *r)
{
    size_t heads = (size_t)r->n_layers * r->n_kv_heads, ranked = 0;
    uint32_t n = count_effects(r), F = r->n_features;
    double *sum = need(n, sizeof *sum, "effects");
    for (size_t h = 0; h < heads; h++) {
        bool any = false;
        for (uint32_t i = 0; i < n; i++) {
            sum[i] += effect_of(r, h, i);
            any |= effect_of(r, h, i) > 0;
        }
        ranked += any;
    }
    cJSON *effects = cJSON_AddObjectToObject(doc, "mean_effect");
    for (uint32_t i = 0; i < n; i++) {
        char name[96];
        bool of_layer = i >= F && i + 1 < n;
        snprintf(name, sizeof name, "%s%s", of_layer ? "layer's " : "",
                 i < F      ? r->metrics[i]
                 : of_layer ? r->metrics[i - F]
                            : "recency");
        cJSON_AddNumberToObject(effects, name, ranked ? sum[i] / (double)ranked : 0);
    }
    free(sum);
}

kvb_status inspect_ranking(cJSON *doc, const char *path, kvb_error *err)
{
    kvb_ranking *ranking;
    cJSON *about = NULL;
    kvb_status status = kvb_ranking_open(&ranking, path, err);
    if (status != KVB_OK) return status;
    const kvb_ranking_info *r = kvb_ranking_about(ranking);
    json_put(doc, "name %s model_sha256 %s n_layers %u n_kv_heads %u", r->name, r->model_sha256, r->n_layers,
             r->n_kv_heads);
    add_effects(doc, r);
    status = kvb_json_object(&about, r->about, strlen(r->about), path, "metadata \"ranking\"", err);
    cJSON_AddItemToObject(doc, "ranking", about);
    kvb_ranking_close(ranking);
    return status;
}

// ---- What was asked and answered ------------------------------------------------------------------------------------

// Text that JSON can hold: broken UTF-8 becomes U+FFFD, NUL a space. The caller frees.
static char *clean_text(const char *data, size_t size)
{
    size_t n = 0;
    const char *repaired = NULL;
    char *owned = NULL;
    utf8_repair(data, size, &repaired, &n, &owned);
    char *text = need(n + 1, 1, "characters");
    for (size_t i = 0; i < n; i++) text[i] = (char)(repaired[i] ? repaired[i] : ' ');
    free(owned);
    return text;
}

static char *decode_as_text(const tokenizer *t, const int32_t *ids, size_t n)
{
    size_t size = tokenizer_decode(t, ids, n, NULL, 0);
    char *bytes = need(size + 1, 1, "characters");
    tokenizer_decode(t, ids, n, bytes, size);
    char *text = clean_text(bytes, size);
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
        json_put(one, "context %s question %u n_queries %u", c->id, c->questions[q].number, c->questions[q].n_queries);
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
    if (status == KVB_OK) status = weights_open(&w, model, false, err);
    if (status == KVB_OK) status = tokenizer_open(&t, w, pre, err);
    if (status == KVB_OK) status = check_tokenizer(r, path, t, model, err);
    cJSON *list = cJSON_AddArrayToObject(doc, "answers");
    for (size_t i = 0; status == KVB_OK && i < record_context_count(r); i++) status = add_context(list, r, i, t, err);
    tokenizer_free(t);
    weights_close(w);
    record_close(r);
    return status;
}
