#include "table_export.h"
#include "file_read.h"
#include "json_file.h"
#include "need.h"
#include "npy.h"
#include "runtime/fail.h"
#include "runtime/safetensors.h"
#include "sha256.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIDECAR_FORMAT "kvbudget-npy-sidecar"

// NAME.json beside NAME.npy.
static char *sidecar_path(const char *npy_path)
{
    size_t n = strlen(npy_path);
    if (n > 4 && strcmp(npy_path + n - 4, ".npy") == 0) n -= 4;
    return need_text("%.*s.json", (int)n, npy_path);
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
        kvb_safetensors_free(&file);
    }
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

static const char *text_of(const cJSON *metadata, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(metadata, key);
    return cJSON_IsString(item) ? item->valuestring : "";
}

// Quotes a text as a literal of both JSON and Python; free it with cJSON_free.
static char *quoted(const char *text)
{
    cJSON *item = cJSON_CreateString(text);
    char *literal = cJSON_PrintUnformatted(item);
    cJSON_Delete(item);
    return literal;
}

// Whether Python can take it for a name and nothing else: tables may come from anybody.
static bool is_identifier(const char *text)
{
    return *text && strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") == strlen(text);
}

// One argument of a call in Python: window_size=64.
static char *argument_text(const cJSON *a)
{
    char number[32];
    if (cJSON_IsString(a)) {
        char *literal = quoted(a->valuestring), *text = need_text("%s=%s", a->string, literal);
        cJSON_free(literal);
        return text;
    }
    if (cJSON_IsRaw(a)) return need_text("%s=%s", a->string, a->valuestring);
    if (cJSON_IsBool(a)) return need_text("%s=%s", a->string, cJSON_IsTrue(a) ? "True" : "False");
    snprintf(number, sizeof number, "%.15g", a->valuedouble);
    if (strtod(number, NULL) != a->valuedouble) snprintf(number, sizeof number, "%.17g", a->valuedouble);
    return need_text("%s=%s", a->string, number);
}

// "SnapKVPress(window_size=64, kernel_size=5)" from what a scorer declares.
static char *call_text(const cJSON *press)
{
    const cJSON *argument;
    const char *name = text_of(press, "press"), *separator = "";
    char *text = need_text("%s(", is_identifier(name) ? name : "YourPress");
    cJSON_ArrayForEach(argument, cJSON_GetObjectItemCaseSensitive(press, "arguments"))
    {
        if (!is_identifier(argument->string)) continue;
        char *before = text, *more = argument_text(argument);
        text = need_text("%s%s%s", before, separator, more);
        free_all(before, more);
        separator = ", ";
    }
    char *call = need_text("%s)", text);
    free(text);
    return call;
}

char *table_kvpress_code(const char *npy_name, const cJSON *metadata, const cJSON *press)
{
    const char *sink = text_of(metadata, "sink"), *window = text_of(metadata, "window");
    char *call = call_text(press), *name = quoted(npy_name);
    char *load = need_text("import numpy, kvpress\n"
                           "press = kvpress.LUKVPress(kvpress.%s, compression_ratio=0.8, sink=%s, window=%s)\n"
                           "press._budget_curves = numpy.load(%s)  # [99, layers, KV heads], share of tokens pruned",
                           call, *sink ? sink : "4", *window ? window : "1", name);
    free(call);
    cJSON_free(name);
    return load;
}

char *table_kvpress_warning(const table_content *t, const cJSON *press)
{
    const char *scorer = text_of(press, "press")[0] ? text_of(press, "warning")
                                                    : "choose the kvpress scorer that ranks tokens as the metric does";
    const char *limits =
        text_of(t->metadata, "constraints")[0]
            ? "LUKVPress ignores the table's constraints (pages, ranks, caps): BudgetPress of kvbudget "
              "keeps to them"
            : "";
    char *saturated = NULL;
    for (uint32_t i = 0; !saturated && i < t->n_rows; i++)
        if (t->saturated[i])
            saturated = need_text("from ratio %g on less is pruned than LUKVPress is asked for, since heads stopped at "
                                  "their floor: %g at %g",
                                  t->ratio[i], t->effective_ratio[i], t->ratio[i]);
    char *all = need_text("%s%s%s%s%s", scorer, *scorer && *limits ? "; " : "", limits,
                          (*scorer || *limits) && saturated ? "; " : "", saturated ? saturated : "");
    free(saturated);
    return all;
}

static cJSON *make_sidecar(const table_content *t, const char *npy_path, const char *npy_sha256, const cJSON *press)
{
    const char *slash = strrchr(npy_path, '/'), *name = slash ? slash + 1 : npy_path;
    char *call = call_text(press), *load = table_kvpress_code(name, t->metadata, press),
         *warning = table_kvpress_warning(t, press);
    cJSON *sidecar = cJSON_CreateObject();
    json_put(sidecar, "format %s format_version %s npy %s npy_sha256 %s", SIDECAR_FORMAT, "1", name, npy_sha256);
    cJSON_AddItemToObject(sidecar, "metadata", cJSON_Duplicate(t->metadata, 1));
    cJSON *kvpress = cJSON_AddObjectToObject(sidecar, "kvpress");
    json_put(kvpress, "version %s press %s load %s", "0.5.5", call, load);
    if (*warning) cJSON_AddStringToObject(kvpress, "warning", warning);
    free_all(call, load, warning);
    return sidecar;
}

kvb_status table_export_npy(const char *npy_path, const table_content *t, const cJSON *press, kvb_error *err)
{
    if (text_of(t->metadata, "n_rows")[0])
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "%s: the table has %u rows up to ratio %g, and kvpress's LUKVPress takes row round(100 r) of 99, "
            "whichever ratio stands there; solve it without --ratios, or use kvbudget.BudgetPress, which "
            "reads the table itself",
            npy_path, t->n_rows, t->ratio[t->n_rows - 1]);
    const uint64_t shape[3] = {t->n_rows, t->n_layers, t->n_kv_heads};
    char sha256[65], *side = sidecar_path(npy_path);
    kvb_status status = npy_write(npy_path, NPY_F64, 3, shape, t->prune_ratio, err);
    if (status == KVB_OK) status = sha256_file_hex(npy_path, sha256, err);
    if (status == KVB_OK) {
        cJSON *sidecar = make_sidecar(t, npy_path, sha256, press);
        status = json_write(side, sidecar, err);
        cJSON_Delete(sidecar);
    }
    free(side);
    return status;
}
