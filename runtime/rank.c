// Scores by a learned ranking: a linear form of what cheap metrics say about a token. The profiler, the evaluator and
// the solver use these functions too, so that budgets are made for the very order that an engine finds.
#include "rank.h"
#include "fail.h"
#include "json.h"
#include "sha256.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

double kvb_rank_value(float score, int logarithm)
{
    if (!logarithm) return score;
    return log(score > KVB_RANK_LOG_LEAST ? (double)score : KVB_RANK_LOG_LEAST);
}

uint32_t kvb_rank_finite(const float *scores, uint32_t n_tokens)
{
    uint32_t j = 0;
    while (j < n_tokens && isfinite(scores[j])) j++;
    return j;
}

void kvb_rank_moments(const float *scores, int logarithm, uint32_t sink, uint32_t n_tokens, double *mean, double *scale)
{
    double sum = 0, squares = 0, shift = 0, n = (double)n_tokens - sink;
    *mean = *scale = 0;
    if (n_tokens <= sink) return;
    shift = kvb_rank_value(scores[sink], logarithm); // so that squares of large numbers do not cancel
    for (uint32_t j = sink; j < n_tokens; j++) {
        double x = kvb_rank_value(scores[j], logarithm) - shift;
        sum += x;
        squares += x * x;
    }
    double variance = squares / n - sum / n * (sum / n);
    if (!(variance > 1e-12 * (squares / n))) return; // all alike but for rounding
    *mean = shift + sum / n;
    *scale = 1 / sqrt(variance);
}

// Adds feature f's part to the scores out [G, T]: from a head's z, and with layer_mean from the mean z of the G heads.
// weights [G, P], columns as in kvb_ranking_info; scores [G, T].
static kvb_status add_feature(const kvb_ranking *r, const double *weights, uint32_t G, uint32_t f, const float *scores,
                              uint32_t n_tokens, float *out, kvb_error *err)
{
    double mean[KVB_MAX_KV_HEADS], scale[KVB_MAX_KV_HEADS];
    uint32_t F = r->info.n_features, P = r->info.n_columns;
    for (uint32_t g = 0; g < G; g++) {
        const float *own = scores + (size_t)g * n_tokens;
        const double *frozen = weights + (size_t)(g + 1) * P - 2 - 2 * F + 2 * f;
        uint32_t bad = kvb_rank_finite(own, n_tokens);
        if (bad < n_tokens)
            return kvb_fail(err, KVB_NUMERIC, "%s: feature %u, head %u, token %u: expected a finite score, found %g",
                            r->info.name, (unsigned)f, (unsigned)g, (unsigned)bad, (double)own[bad]);
        if (r->info.frozen) mean[g] = frozen[0], scale[g] = frozen[1];
        else kvb_rank_moments(own, r->logarithm[f], r->info.sink, n_tokens, &mean[g], &scale[g]);
    }
    for (uint32_t j = r->info.sink; j < n_tokens; j++) {
        double sum = 0;
        for (uint32_t g = 0; g < G; g++) {
            const double *w = weights + (size_t)g * P + 2 * f;
            size_t i = (size_t)g * n_tokens + j;
            double z = (kvb_rank_value(scores[i], r->logarithm[f]) - mean[g]) * scale[g];
            sum += z;
            out[i] += (float)(z * (w[0] + w[1] * fabs(z)));
        }
        for (uint32_t g = 0; r->info.layer_mean && g < G; g++)
            out[(size_t)g * n_tokens + j] += (float)(weights[(size_t)g * P + 2 * F + f] * sum / G);
    }
    return KVB_OK;
}

kvb_status kvb_rank_heads(const kvb_ranking *r, uint32_t fold, size_t head, uint32_t n_heads,
                          const float *const *features, uint32_t n_tokens, float *out, kvb_error *err)
{
    size_t P = r->info.n_columns, all = (size_t)r->info.n_layers * r->info.n_kv_heads;
    const double *weights = r->weights + (fold * all + head) * P;
    kvb_status status = KVB_OK;
    for (uint32_t g = 0; g < n_heads; g++) {
        const double *last = weights + (g + 1) * P - 2; // recency, constant
        for (uint32_t j = 0; j < n_tokens; j++)
            out[(size_t)g * n_tokens + j] = (float)(last[1] - last[0] * log((double)(n_tokens - j)));
    }
    for (uint32_t f = 0; f < r->info.n_features && status == KVB_OK; f++)
        status = add_feature(r, weights, n_heads, f, features[f], n_tokens, out, err);
    return status;
}

// ---- Reading a ranking from a file of its own or out of a table ----

static const size_t file_max_bytes = 64u << 20;

const kvb_ranking_info *kvb_ranking_about(const kvb_ranking *ranking)
{
    return ranking ? &ranking->info : NULL;
}

void kvb_ranking_close(kvb_ranking *ranking)
{
    if (ranking) {
        cJSON_Delete(ranking->tree);
        free(ranking->weights);
        free(ranking->about);
        free(ranking);
    }
}

// ---- The metadata "ranking" ----

static kvb_status read_feature(kvb_ranking *r, const cJSON *item, const char *name, kvb_error *err)
{
    uint32_t f = r->info.n_features++;
    const cJSON *metric = cJSON_GetObjectItemCaseSensitive(item, "metric"),
                *logarithm = cJSON_GetObjectItemCaseSensitive(item, "log");
    if (!cJSON_IsString(metric) || !*metric->valuestring || !cJSON_IsBool(logarithm)) {
        return kvb_fail(err, KVB_FORMAT,
                        "%s: metadata \"ranking\": feature %u: expected {\"metric\": text, \"log\": true or false}",
                        name, (unsigned)f);
    }
    r->metrics[f] = metric->valuestring;
    r->logarithm[f] = cJSON_IsTrue(logarithm);
    return KVB_OK;
}

static kvb_status read_features(kvb_ranking *r, const char *name, kvb_error *err)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(r->tree, "features"), *item;
    int n = cJSON_IsArray(list) ? cJSON_GetArraySize(list) : 0;
    kvb_status status = KVB_OK;
    if (n < 1 || n > KVB_RANK_FEATURES_MAX) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"ranking\": expected 1 to %d features, found %d", name,
                        KVB_RANK_FEATURES_MAX, n);
    }
    cJSON_ArrayForEach(item, list) if (!status) status = read_feature(r, item, name, err);
    return status;
}

// Reads an entry that is true, false or missing.
static kvb_status read_flag(int *out, const kvb_ranking *r, const char *key, const char *name, kvb_error *err)
{
    const cJSON *flag = cJSON_GetObjectItemCaseSensitive(r->tree, key);
    if (flag && !cJSON_IsBool(flag))
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"ranking\": %s: expected true or false", name, key);
    *out = cJSON_IsTrue(flag);
    return KVB_OK;
}

// Reads layer_mean and frozen, which older rankings do not have, and derives the number of columns.
static kvb_status read_form(kvb_ranking *r, const char *name, kvb_error *err)
{
    kvb_status status = read_flag(&r->info.layer_mean, r, "layer_mean", name, err);
    if (!status) status = read_flag(&r->info.frozen, r, "frozen", name, err);
    r->info.n_columns = (2u + !!r->info.layer_mean + 2u * !!r->info.frozen) * r->info.n_features + 2;
    return status;
}

static bool is_hash(const cJSON *item)
{
    return cJSON_IsString(item) && strlen(item->valuestring) == 64 &&
           strspn(item->valuestring, "0123456789abcdef") == 64;
}

// Reads which contexts each fold has left out.
static kvb_status read_folds(kvb_ranking *r, const char *name, kvb_error *err)
{
    const cJSON *fold, *context;
    r->folds = cJSON_GetObjectItemCaseSensitive(r->tree, "folds");
    int n = cJSON_IsArray(r->folds) ? cJSON_GetArraySize(r->folds) : -1;
    bool good = n >= 0 && n <= KVB_RANK_FOLDS_MAX;
    cJSON_ArrayForEach(fold, r->folds)
    {
        good = good && cJSON_IsArray(fold);
        cJSON_ArrayForEach(context, fold) good = good && is_hash(context);
    }
    r->n_folds = good ? (uint32_t)n : 0;
    if (good) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT, "%s: metadata \"ranking\": folds: expected at most %d lists of SHA-256", name,
                    KVB_RANK_FOLDS_MAX);
}

static kvb_status read_name(kvb_ranking *r, const char *name, kvb_error *err)
{
    static const char begin[] = "learned:";
    const cJSON *own = cJSON_GetObjectItemCaseSensitive(r->tree, "name"),
                *sink = cJSON_GetObjectItemCaseSensitive(r->tree, "sink");
    const char *text = cJSON_IsString(own) ? own->valuestring : "";
    if (strncmp(text, begin, sizeof begin - 1) != 0 || strlen(text) != sizeof begin - 1 + 12 ||
        strspn(text + sizeof begin - 1, "0123456789abcdef") != 12) {
        return kvb_fail(err, KVB_FORMAT,
                        "%s: metadata \"ranking\": name: expected learned: and 12 digits, found '%.40s'", name, text);
    }
    if (!cJSON_IsNumber(sink) || !(sink->valuedouble >= 0 && sink->valuedouble <= 1 << 20) ||
        sink->valuedouble != (double)(uint32_t)sink->valuedouble) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"ranking\": sink: expected a number of tokens", name);
    }
    r->info.name = text;
    r->info.sink = (uint32_t)sink->valuedouble;
    return KVB_OK;
}

// ---- Weights ----

// Reads weights [1 + folds, L, G, P]. L and G are the tensor's; its bytes are in the file, so no product of them wraps.
static kvb_status read_weights(kvb_ranking *r, const kvb_safetensors *file, kvb_error *err)
{
    const kvb_tensor *x = kvb_safetensors_find(file, "rank_weights");
    if (!x || strcmp(x->dtype, "F64") != 0 || x->n_dims != 4 || x->shape[0] != 1 + (uint64_t)r->n_folds ||
        x->shape[3] != r->info.n_columns || x->size == 0 || x->shape[1] > UINT32_MAX ||
        x->shape[2] > KVB_MAX_KV_HEADS) {
        return kvb_fail(err, KVB_FORMAT, "%s: tensor \"rank_weights\": expected F64 [%u, layers, heads, %u]",
                        file->name, (unsigned)r->n_folds + 1, (unsigned)r->info.n_columns);
    }
    r->info.n_layers = (uint32_t)x->shape[1];
    r->info.n_kv_heads = (uint32_t)x->shape[2];
    r->weights = malloc(x->size);
    if (!r->weights) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %zu bytes", file->name, x->size);
    for (size_t i = 0; i < x->size / 8; i++) {
        r->weights[i] = kvb_load_f64(x->data + 8 * i);
        if (!isfinite(r->weights[i]))
            return kvb_fail(err, KVB_NUMERIC, "%s: tensor \"rank_weights\": element %zu is not finite", file->name, i);
    }
    r->info.weights = r->weights;
    return KVB_OK;
}

// The name is a hash of the text, without the name that was added at its end afterwards, and of the weights.
static kvb_status check_name(const kvb_ranking *r, const kvb_safetensors *file, kvb_error *err)
{
    static const char key[] = ",\"name\":\"";
    const kvb_tensor *weights = kvb_safetensors_find(file, "rank_weights");
    const char *text = r->about, *at = strstr(text, key), *rest = at ? at + sizeof key - 1 + strlen(r->info.name) : "";
    char hash[65] = "";
    if (*rest++ == '"') {
        const kvb_bytes pieces[] = {{text, (size_t)(at - text)}, {rest, strlen(rest)}, {weights->data, weights->size}};
        kvb_sha256(pieces, 3, hash);
    }
    if (strncmp(r->info.name + sizeof "learned:" - 1, hash, 12) == 0) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT,
                    "%s: the ranking is called %s, but its content hashes to learned:%.12s; it is damaged, get it "
                    "again or make it with `kvbudget learn`",
                    file->name, r->info.name, hash);
}

static kvb_status check_format(const kvb_safetensors *file, const char *text, kvb_error *err)
{
    const char *format = kvb_safetensors_metadata(file->header, "format"),
               *version = kvb_safetensors_metadata(file->header, "format_version");
    bool known = format && (strcmp(format, "kvbudget-rank") == 0 || strcmp(format, "kvbudget-table") == 0);
    if (!text || !known) {
        return kvb_fail(err, KVB_FORMAT,
                        "%s: expected a ranking or a table that carries one, found metadata \"format\" \"%.40s\" %s a "
                        "ranking; make one with `kvbudget learn`",
                        file->name, format ? format : "", text ? "with" : "without");
    }
    bool table = strcmp(format, "kvbudget-table") == 0; // whose second version has formats of heads
    if (version && (strcmp(version, "1") == 0 || (table && strcmp(version, "2") == 0))) return KVB_OK;
    return kvb_fail(err, KVB_VERSION,
                    "%s: metadata \"format_version\": expected \"1\", found \"%.40s\"; use a newer kvbudget",
                    file->name, version ? version : "");
}

kvb_status kvb_ranking_read(kvb_ranking **out, const kvb_safetensors *file, kvb_error *err)
{
    const char *text = kvb_safetensors_metadata(file->header, "ranking"),
               *model = kvb_safetensors_metadata(file->header, "model_sha256");
    *out = NULL;
    kvb_status status = check_format(file, text, err);
    if (status) return status;
    kvb_ranking *r = calloc(1, sizeof *r);
    if (r && (r->about = malloc(strlen(text) + 1))) memcpy(r->about, text, strlen(text) + 1);
    if (r && model) (void)snprintf(r->model_sha256, sizeof r->model_sha256, "%s", model);
    if (!r || !r->about) status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory", file->name);
    if (!status) status = kvb_json_object(&r->tree, text, strlen(text), file->name, "metadata \"ranking\"", err);
    if (!status) status = read_name(r, file->name, err);
    if (!status) status = read_features(r, file->name, err);
    if (!status) status = read_form(r, file->name, err);
    if (!status) status = read_folds(r, file->name, err);
    if (!status) status = read_weights(r, file, err);
    if (!status) status = check_name(r, file, err);
    if (status) {
        kvb_ranking_close(r);
        return status;
    }
    r->info.metrics = r->metrics;
    r->info.logarithm = r->logarithm;
    r->info.about = r->about;
    r->info.model_sha256 = r->model_sha256;
    *out = r;
    return KVB_OK;
}

uint32_t kvb_ranking_fold(const kvb_ranking *r, const char *context_sha256)
{
    const cJSON *fold, *context;
    uint32_t number = 0;
    cJSON_ArrayForEach(fold, r->folds)
    {
        number++;
        cJSON_ArrayForEach(context, fold) if (strcmp(context->valuestring, context_sha256) == 0) return number;
    }
    return 0;
}

// ---- Opening ----

kvb_status kvb_ranking_open_memory(kvb_ranking **out, const void *data, size_t size, const char *name, kvb_error *err)
{
    kvb_safetensors file;
    if (out) *out = NULL;
    if (!out || !data) return kvb_fail(err, KVB_ARGUMENT, "kvb_ranking_open_memory: out and data must not be NULL");
    kvb_status status = kvb_safetensors_parse(&file, data, size, name ? name : "<memory>", err);
    if (status) return status;
    status = kvb_ranking_read(out, &file, err);
    kvb_safetensors_free(&file);
    return status;
}

kvb_status kvb_ranking_open(kvb_ranking **out, const char *path, kvb_error *err)
{
    unsigned char *data;
    size_t size;
    if (out) *out = NULL;
    if (!out || !path) return kvb_fail(err, KVB_ARGUMENT, "kvb_ranking_open: out and path must not be NULL");
    kvb_status status = kvb_file_read(&data, &size, path, file_max_bytes, err);
    if (!status) status = kvb_ranking_open_memory(out, data, size, path, err);
    free(data);
    return status;
}
