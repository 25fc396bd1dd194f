#include "tools/report/inspect_files.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/record.h"
#include "profiler/text/tokenizer.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/gguf.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "tools/report/results.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

// ---- A model's file -------------------------------------------------------------------------------------------------

enum { ELEMENTS_SHOWN = 8 };

// A number of any type as it would stand in JSON; NaN and infinity have no JSON form and become null.
static void format_number(char out[40], gguf_value_type type, const unsigned char *p)
{
    gguf_array one = {type, 1, p, 0};
    if (type == GGUF_VALUE_F32 || type == GGUF_VALUE_F64) {
        float narrow;
        double wide;
        memcpy(&narrow, p, sizeof narrow);
        if (type == GGUF_VALUE_F64) memcpy(&wide, p, sizeof wide);
        else wide = (double)narrow;
        if (isfinite(wide)) snprintf(out, 40, type == GGUF_VALUE_F32 ? "%.9g" : "%.17g", wide);
        else strcpy(out, "null");
    } else if (type == GGUF_VALUE_BOOL) {
        strcpy(out, *p ? "true" : "false");
    } else if (type == GGUF_VALUE_U64) {
        uint64_t n = 0;
        memcpy(&n, p, sizeof n);
        snprintf(out, 40, "%llu", (unsigned long long)n);
    } else {
        snprintf(out, 40, "%lld", (long long)gguf_array_int(&one, 0));
    }
}

static size_t number_size(gguf_value_type type)
{
    static const size_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return sizes[type];
}

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

static cJSON *text_item(gguf_string s)
{
    char *text = clean_text(s.data, s.size);
    cJSON *item = cJSON_CreateString(text);
    free(text);
    return item;
}

static cJSON *number_item(gguf_value_type type, const unsigned char *p)
{
    char number[40];
    format_number(number, type, p);
    return cJSON_CreateRaw(number);
}

static cJSON *array_item(const gguf_value *v)
{
    gguf_array rest = {v->element, v->count, v->data, v->size};
    gguf_string s;
    cJSON *item = cJSON_CreateObject(), *first;
    json_put(item, "element %s count %g", gguf_value_type_name(v->element), (double)v->count);
    first = cJSON_AddArrayToObject(item, "first");
    for (uint64_t i = 0; i < v->count && i < ELEMENTS_SHOWN && v->element != GGUF_VALUE_ARRAY; i++)
        cJSON_AddItemToArray(first, gguf_next_string(&rest, &s)
                                        ? text_item(s)
                                        : number_item(v->element, v->data + i * number_size(v->element)));
    return item;
}

static cJSON *tensor_item(const gguf_tensor *t)
{
    cJSON *item = cJSON_CreateObject(), *shape;
    cJSON_AddItemToObject(item, "name", text_item(t->name));
    cJSON_AddStringToObject(item, "type", gguf_tensor_type_name(t->type));
    shape = cJSON_AddArrayToObject(item, "shape");
    for (uint32_t d = t->n_dims; d-- > 0;) cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->dims[d]));
    json_put(item, "bytes %g readable %d", (double)t->size, t->data != NULL);
    return item;
}

static void add_gguf(cJSON *root, const gguf_file *f)
{
    double values = 0; // shapes of unreadable types are not bounded by the file: a sum of integers could wrap
    uint64_t bytes = 0;
    for (size_t i = 0; i < f->n_tensors; i++) {
        values += (double)f->tensors[i].n_values;
        bytes += f->tensors[i].size;
    }
    json_put(root, "format %s version %u alignment %u n_values %g n_bytes %g", "gguf", f->version, f->alignment, values,
             (double)bytes);
    cJSON *metadata = cJSON_AddObjectToObject(root, "metadata");
    for (size_t i = 0; i < f->n_values; i++) {
        const gguf_value *v = &f->values[i];
        char *key = clean_text(v->key.data, v->key.size);
        cJSON_AddItemToObject(metadata, key,
                              v->type == GGUF_VALUE_STRING  ? text_item((gguf_string){(const char *)v->data, v->size})
                              : v->type == GGUF_VALUE_ARRAY ? array_item(v)
                                                            : number_item(v->type, v->data));
        free(key);
    }
    cJSON *tensors = cJSON_AddArrayToObject(root, "tensors");
    for (size_t i = 0; i < f->n_tensors; i++) cJSON_AddItemToArray(tensors, tensor_item(&f->tensors[i]));
}

kvb_status inspect_gguf(cJSON *doc, const char *path, kvb_error *err)
{
    gguf_file f;
    kvb_status status = gguf_open(&f, path, err);
    if (status != KVB_OK) return status;
    add_gguf(doc, &f);
    status = file_check(&f.map, path, err);
    gguf_close(&f);
    return status;
}

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

// ---- Results --------------------------------------------------------------------------------------------------------

bool is_results(const char *data, size_t size)
{
    static const char schema[] = "\"" RESULTS_SCHEMA "\"";
    enum { LOOKED_AT = 256 };
    return memmem(data, size < LOOKED_AT ? size : LOOKED_AT, schema, sizeof schema - 1) != NULL;
}

kvb_status inspect_results(cJSON *doc, const char *data, size_t size, const char *path, kvb_error *err)
{
    results_document r;
    kvb_status status = results_parse(&r, data, size, path, err);
    if (status != KVB_OK) return status;
    const cJSON *column;
    cJSON *columns = results_columns(r.rows), *names;
    cJSON_AddStringToObject(doc, "command", r.command);
    cJSON_AddItemToObject(doc, "arguments", cJSON_Duplicate(r.arguments, true));
    cJSON_AddItemToObject(doc, "inputs", cJSON_Duplicate(r.inputs, true));
    cJSON_AddNumberToObject(doc, "n_rows", cJSON_GetArraySize(r.rows));
    names = cJSON_AddArrayToObject(doc, "columns");
    cJSON_ArrayForEach(column, columns) cJSON_AddItemToArray(names, cJSON_CreateString(column->string));
    cJSON_Delete(columns);
    results_close(&r);
    return KVB_OK;
}

// ---- What was asked and answered ------------------------------------------------------------------------------------

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
