#include "table_export.h"
#include "file_read.h"
#include "json_file.h"
#include "npy.h"
#include "runtime/fail.h"
#include "runtime/safetensors.h"
#include "sha256.h"
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIDECAR_FORMAT "kvbudget-npy-sidecar"

char *table_sidecar_path(const char *npy_path)
{
    size_t n = strlen(npy_path);
    if (n > 4 && strcmp(npy_path + n - 4, ".npy") == 0) n -= 4;
    char *path = NULL;
    return asprintf(&path, "%.*s.json", (int)n, npy_path) < 0 ? NULL : path;
}

kvb_status table_metadata_read(cJSON **out, const char *path, kvb_error *err)
{
    *out = NULL;
    file_view view;
    kvb_safetensors file;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = kvb_safetensors_parse(&file, view.data, view.size, path, err);
    if (status == KVB_OK) {
        const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(file.header, "__metadata__");
        *out = metadata ? cJSON_Duplicate(metadata, 1) : cJSON_CreateObject();
        if (!*out) status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
        kvb_safetensors_free(&file);
    }
    file_unmap(&view);
    return status;
}

// ---- The side-car ----

static const char *text_of(const cJSON *metadata, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(metadata, key);
    return cJSON_IsString(item) ? item->valuestring : "";
}

// A number out of the text of metric_parameters, or `otherwise`.
static double parameter(const cJSON *parameters, const char *key, double otherwise)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(parameters, key);
    return cJSON_IsNumber(item) ? item->valuedouble : otherwise;
}

static bool is_named(const cJSON *parameters, const char *key, const char *otherwise)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(parameters, key);
    return !cJSON_IsString(item) || strcmp(item->valuestring, otherwise) == 0;
}

// Whether `metric` is `name`, with a variant or parameters behind it or without.
static bool is_metric(const char *metric, const char *name)
{
    size_t n = strlen(name);
    return strncmp(metric, name, n) == 0 && (metric[n] == ':' || !metric[n]);
}

// Presses with parameters; false when it is none of these.
static bool press_with_parameters(char *press, size_t size, const char **note, const char *metric, const cJSON *p)
{
    if (is_metric(metric, "snapkv")) {
        snprintf(press, size, "SnapKVPress(window_size=%.0f, kernel_size=%.0f)", parameter(p, "window", 64),
                 parameter(p, "kernel", 5));
        if (parameter(p, "max_pool", strcmp(metric, "snapkv:lukv") == 0) != 0)
            *note = "kvpress has no SnapKV with max pooling: its ranking differs from the one that was calibrated";
        else if (parameter(p, "group_max", 0) != 0)
            *note =
                "kvpress's SnapKV takes the mean over a group: its ranking differs from the one that was calibrated";
    } else if (is_metric(metric, "ea")) {
        snprintf(press, size,
                 "ExpectedAttentionPress(n_future_positions=%.0f, n_sink=%.0f, use_covariance=%s, use_vnorm=%s, "
                 "epsilon=%g)",
                 parameter(p, "future", 512), parameter(p, "sinks", 4),
                 parameter(p, "covariance", 1) != 0 ? "True" : "False",
                 parameter(p, "value_norm", 1) != 0 ? "True" : "False", parameter(p, "epsilon", 0.02));
        if (parameter(p, "stored", 0) != 0)
            *note = "calibrated with stored query statistics: use ExpectedAttentionStatsPress with the same ones";
        else if (parameter(p, "sinks_in_softmax", strncmp(metric, "ea:lukv", 7) == 0) != 0)
            *note = "kvpress leaves the sinks out of the softmax: its ranking differs from the one that was calibrated";
    } else if (is_metric(metric, "lagkv")) {
        snprintf(press, size, "LagKVPress(n_sink=%.0f, lag_size=%.0f, cross_scoring=%s)", parameter(p, "sink", 4),
                 parameter(p, "lag", 128), parameter(p, "cross", 0) != 0 ? "True" : "False");
        if (!is_named(p, "mode", "lag") || parameter(p, "lambda", 1) != 1)
            *note = "kvpress's LagKV has no other mode or weight: its ranking differs from the one that was calibrated";
    } else {
        return false;
    }
    return true;
}

// The kvpress 0.5.5 press that ranks tokens as the metric does; what it is when there is none.
static void describe_press(char *press, size_t size, const char **note, const cJSON *metadata)
{
    const char *metric = text_of(metadata, "metric");
    cJSON *parameters = cJSON_Parse(text_of(metadata, "metric_parameters"));
    *note = NULL;
    if (is_metric(metric, "keydiff")) {
        snprintf(press, size, "KeyDiffPress()");
        if (!is_named(parameters, "anchor", "mean") || !is_named(parameters, "similarity", "cos"))
            *note = "kvpress's KeyDiff has the mean anchor and the cosine: its ranking differs from the one that was "
                    "calibrated";
    } else if (is_metric(metric, "tova") && is_named(parameters, "scope", "layer")) {
        snprintf(press, size, "TOVAPress()");
    } else if (is_metric(metric, "knorm")) {
        snprintf(press, size, "KnormPress()");
    } else if (is_metric(metric, "random")) {
        snprintf(press, size, "RandomPress()");
        *note = "another random order than the one that was calibrated";
    } else if (!press_with_parameters(press, size, note, metric, parameters)) {
        snprintf(press, size, "YourPress()");
        *note = "choose the kvpress scorer that ranks tokens as the metric does";
    }
    cJSON_Delete(parameters);
}

static bool add_kvpress(cJSON *sidecar, const cJSON *metadata, const char *npy_path)
{
    const char *slash = strrchr(npy_path, '/'), *file = slash ? slash + 1 : npy_path, *note;
    char press[192], *load = NULL;
    describe_press(press, sizeof press, &note, metadata);
    const char *sink = text_of(metadata, "sink"), *window = text_of(metadata, "window");
    int n = asprintf(&load,
                     "import numpy, kvpress\n"
                     "press = kvpress.LUKVPress(kvpress.%s, compression_ratio=0.8, sink=%s, window=%s)\n"
                     "press._budget_curves = numpy.load(\"%s\")  # [99, layers, KV heads], share of tokens pruned",
                     press, *sink ? sink : "4", *window ? window : "1", file);
    if (n < 0) return false;
    cJSON *kvpress = cJSON_AddObjectToObject(sidecar, "kvpress");
    bool ok = kvpress && cJSON_AddStringToObject(kvpress, "version", "0.5.5") &&
              cJSON_AddStringToObject(kvpress, "press", press) && cJSON_AddStringToObject(kvpress, "load", load) &&
              (!note || cJSON_AddStringToObject(kvpress, "warning", note));
    free(load);
    return ok;
}

// NULL when memory is short.
static cJSON *make_sidecar(const char *npy_path, const char *npy_sha256, const cJSON *metadata)
{
    const char *slash = strrchr(npy_path, '/');
    cJSON *sidecar = cJSON_CreateObject(), *copy = cJSON_Duplicate(metadata, 1);
    bool ok = sidecar && copy && cJSON_AddStringToObject(sidecar, "format", SIDECAR_FORMAT) &&
              cJSON_AddStringToObject(sidecar, "format_version", "1") &&
              cJSON_AddStringToObject(sidecar, "npy", slash ? slash + 1 : npy_path) &&
              cJSON_AddStringToObject(sidecar, "npy_sha256", npy_sha256) &&
              cJSON_AddItemToObject(sidecar, "metadata", copy);
    if (ok) ok = add_kvpress(sidecar, metadata, npy_path);
    else cJSON_Delete(copy);
    if (ok) return sidecar;
    cJSON_Delete(sidecar);
    return NULL;
}

kvb_status table_export_npy(const char *npy_path, uint32_t n_rows, uint32_t n_layers, uint32_t n_kv_heads,
                            const double *prune_ratio, const cJSON *metadata, kvb_error *err)
{
    size_t count;
    if (__builtin_mul_overflow((size_t)n_rows * n_layers, n_kv_heads, &count))
        return kvb_fail(err, KVB_ARGUMENT, "%s: impossible shape [%u,%u,%u]", npy_path, n_rows, n_layers, n_kv_heads);
    for (size_t i = 0; i < count; i++) {
        if (!(prune_ratio[i] >= 0 && prune_ratio[i] <= 1))
            return kvb_fail(err, KVB_NUMERIC, "%s: element %zu is %g, expected a prune ratio, 0 to 1", npy_path, i,
                            prune_ratio[i]);
    }
    const uint64_t shape[3] = {n_rows, n_layers, n_kv_heads};
    char sha256[65], *sidecar_path = table_sidecar_path(npy_path);
    kvb_status status = sidecar_path ? npy_write(npy_path, NPY_F64, 3, shape, prune_ratio, err)
                                     : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", npy_path);
    if (status == KVB_OK) status = sha256_file_hex(npy_path, sha256, err);
    cJSON *sidecar = status == KVB_OK ? make_sidecar(npy_path, sha256, metadata) : NULL;
    if (status == KVB_OK) status = json_write(sidecar_path, sidecar, err);
    cJSON_Delete(sidecar);
    free(sidecar_path);
    return status;
}

kvb_status table_sidecar_parse(cJSON **metadata, const void *data, size_t size, const char *name,
                               const char *npy_sha256, kvb_error *err)
{
    *metadata = NULL;
    cJSON *sidecar = cJSON_ParseWithLength(data, size);
    // The metadata alone, written by hand, will do as well.
    bool alone = strcmp(text_of(sidecar, "format"), "kvbudget-table") == 0;
    const cJSON *held = alone ? sidecar : cJSON_GetObjectItemCaseSensitive(sidecar, "metadata"), *item;
    kvb_status status = KVB_OK;
    if (!alone && strcmp(text_of(sidecar, "format"), SIDECAR_FORMAT) != 0)
        status = kvb_fail(err, KVB_FORMAT, "%s: expected JSON with format = \"" SIDECAR_FORMAT "\"", name);
    else if (strcmp(text_of(sidecar, "format_version"), "1") != 0)
        status = kvb_fail(err, KVB_VERSION, "%s: format_version \"%.40s\", expected \"1\"; use a newer kvbudget", name,
                          text_of(sidecar, "format_version"));
    else if (!cJSON_IsObject(held)) status = kvb_fail(err, KVB_FORMAT, "%s: metadata: expected an object", name);
    else if (npy_sha256 && text_of(sidecar, "npy_sha256")[0] && strcmp(text_of(sidecar, "npy_sha256"), npy_sha256) != 0)
        status = kvb_fail(err, KVB_MISMATCH, "%s: belongs to another .npy: it names SHA-256 %.64s, the file has %s",
                          name, text_of(sidecar, "npy_sha256"), npy_sha256);
    cJSON_ArrayForEach(item, held)
    {
        if (status == KVB_OK && !cJSON_IsString(item))
            status = kvb_fail(err, KVB_FORMAT, "%s: metadata: %.80s: expected a string", name, item->string);
    }
    if (status == KVB_OK) {
        *metadata = cJSON_Duplicate(held, 1);
        if (!*metadata) status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory", name);
    }
    cJSON_Delete(sidecar);
    return status;
}
