#include "table_export.h"
#include "file_read.h"
#include "json_file.h"
#include "npy.h"
#include "runtime/fail.h"
#include "runtime/json.h"
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
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

// ---- The side-car ----

static const char *text_of(const cJSON *metadata, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(metadata, key);
    return cJSON_IsString(item) ? item->valuestring : "";
}

// As a literal of JSON and Python alike; to be freed with cJSON_free, NULL when memory is short.
static char *quoted(const char *text)
{
    cJSON *item = cJSON_CreateString(text);
    char *literal = cJSON_PrintUnformatted(item);
    cJSON_Delete(item);
    return literal;
}

// A word that Python can call or name; the table may be of anybody.
static bool is_identifier(const char *text)
{
    return *text && strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") == strlen(text);
}

static bool print_argument(FILE *to, const cJSON *a, const char *separator)
{
    char number[32];
    if (cJSON_IsString(a)) {
        char *text = quoted(a->valuestring);
        bool ok = text && fprintf(to, "%s%s=%s", separator, a->string, text) > 0;
        cJSON_free(text);
        return ok;
    }
    if (cJSON_IsRaw(a)) return fprintf(to, "%s%s=%s", separator, a->string, a->valuestring) > 0;
    if (cJSON_IsBool(a)) return fprintf(to, "%s%s=%s", separator, a->string, cJSON_IsTrue(a) ? "True" : "False") > 0;
    snprintf(number, sizeof number, "%.15g", a->valuedouble);
    if (strtod(number, NULL) != a->valuedouble) snprintf(number, sizeof number, "%.17g", a->valuedouble);
    return fprintf(to, "%s%s=%s", separator, a->string, number) > 0;
}

// "SnapKVPress(window_size=64, kernel_size=5)" of what a scorer declares; malloc'd, NULL when memory is short.
static char *call_text(const cJSON *press)
{
    const cJSON *argument;
    const char *name = text_of(press, "press");
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (!to) return NULL;
    bool ok = fprintf(to, "%s(", is_identifier(name) ? name : "YourPress") > 0;
    const char *separator = "";
    cJSON_ArrayForEach(argument, cJSON_GetObjectItemCaseSensitive(press, "arguments"))
    {
        if (!is_identifier(argument->string)) continue;
        ok = ok && print_argument(to, argument, separator);
        separator = ", ";
    }
    ok = ok && fprintf(to, ")") > 0;
    if (fclose(to) == 0 && ok) return text;
    free(text);
    return NULL;
}

char *table_kvpress_code(const char *npy_name, const cJSON *metadata, const cJSON *press)
{
    const char *sink = text_of(metadata, "sink"), *window = text_of(metadata, "window");
    char *call = call_text(press), *name = quoted(npy_name), *load = NULL;
    if (!call || !name ||
        asprintf(&load,
                 "import numpy, kvpress\n"
                 "press = kvpress.LUKVPress(kvpress.%s, compression_ratio=0.8, sink=%s, window=%s)\n"
                 "press._budget_curves = numpy.load(%s)  # [99, layers, KV heads], share of tokens pruned",
                 call, *sink ? sink : "4", *window ? window : "1", name) < 0)
        load = NULL;
    free(call);
    cJSON_free(name);
    return load;
}

static bool add_kvpress(cJSON *sidecar, const cJSON *metadata, const cJSON *press, const char *npy_path)
{
    const char *slash = strrchr(npy_path, '/');
    const char *warning = text_of(press, "press")[0] ? text_of(press, "warning")
                                                     : "choose the kvpress scorer that ranks tokens as the metric does";
    char *call = call_text(press), *load = table_kvpress_code(slash ? slash + 1 : npy_path, metadata, press);
    cJSON *kvpress = call && load ? cJSON_AddObjectToObject(sidecar, "kvpress") : NULL;
    bool ok = kvpress && cJSON_AddStringToObject(kvpress, "version", "0.5.5") &&
              cJSON_AddStringToObject(kvpress, "press", call) && cJSON_AddStringToObject(kvpress, "load", load) &&
              (!*warning || cJSON_AddStringToObject(kvpress, "warning", warning));
    free(call);
    free(load);
    return ok;
}

// NULL when memory is short.
static cJSON *make_sidecar(const char *npy_path, const char *npy_sha256, const cJSON *metadata, const cJSON *press)
{
    const char *slash = strrchr(npy_path, '/');
    cJSON *sidecar = cJSON_CreateObject(), *copy = cJSON_Duplicate(metadata, 1);
    bool ok = sidecar && copy && cJSON_AddStringToObject(sidecar, "format", SIDECAR_FORMAT) &&
              cJSON_AddStringToObject(sidecar, "format_version", "1") &&
              cJSON_AddStringToObject(sidecar, "npy", slash ? slash + 1 : npy_path) &&
              cJSON_AddStringToObject(sidecar, "npy_sha256", npy_sha256) &&
              cJSON_AddItemToObject(sidecar, "metadata", copy);
    if (ok) ok = add_kvpress(sidecar, metadata, press, npy_path);
    else cJSON_Delete(copy);
    if (ok) return sidecar;
    cJSON_Delete(sidecar);
    return NULL;
}

kvb_status table_export_npy(const char *npy_path, uint32_t n_rows, uint32_t n_layers, uint32_t n_kv_heads,
                            const double *prune_ratio, const cJSON *metadata, const cJSON *press, kvb_error *err)
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
    cJSON *sidecar = status == KVB_OK ? make_sidecar(npy_path, sha256, metadata, press) : NULL;
    if (status == KVB_OK) status = json_write(sidecar_path, sidecar, err);
    cJSON_Delete(sidecar);
    free(sidecar_path);
    return status;
}

kvb_status table_sidecar_parse(cJSON **metadata, const void *data, size_t size, const char *name,
                               const char *npy_sha256, kvb_error *err)
{
    *metadata = NULL;
    bool no_memory;
    cJSON *sidecar = kvb_json_parse(data, size, NULL, &no_memory);
    if (no_memory) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", name);
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
