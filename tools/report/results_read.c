#include "tools/report/results_read.h"
#include "formats/file_read.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "tools/report/results.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BYTES_MAX = 64 << 20 };

double results_number(const cJSON *row, const char *column)
{
    const cJSON *cell = cJSON_GetObjectItemCaseSensitive(row, column);
    return cJSON_IsNumber(cell) ? cell->valuedouble : NAN;
}

const char *results_text(const cJSON *row, const char *column)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(row, column));
    return text ? text : "";
}

interval results_interval_at(const cJSON *row, const char *name)
{
    char low[80], high[80];
    snprintf(low, sizeof low, "%.60s_low", name);
    snprintf(high, sizeof high, "%.60s_high", name);
    return (interval){results_number(row, name), results_number(row, low), results_number(row, high)};
}

static kvb_status check_head(const results_document *r, kvb_error *err)
{
    const char *schema = results_text(r->document, "schema");
    double version = results_number(r->document, "schema_version");
    if (strcmp(schema, RESULTS_SCHEMA) != 0)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: schema: expected \"" RESULTS_SCHEMA "\", found \"%.40s\"; give what a command of this "
                        "version prints with --json, or the NAME.json that eval and task write",
                        r->name, schema);
    if (!(version >= 1)) return kvb_fail(err, KVB_FORMAT, "%s: schema_version: expected a whole number", r->name);
    if (version > RESULTS_VERSION)
        return kvb_fail(err, KVB_VERSION, "%s: schema_version %g, this program knows %d; use a newer kvbudget", r->name,
                        version, RESULTS_VERSION);
    if (!*r->command) return kvb_fail(err, KVB_FORMAT, "%s: command: expected a text", r->name);
    if (!cJSON_IsArray(r->rows)) return kvb_fail(err, KVB_FORMAT, "%s: rows: expected a list", r->name);
    return KVB_OK;
}

static kvb_status check_rows(const results_document *r, kvb_error *err)
{
    const cJSON *row, *cell;
    size_t n = 0;
    cJSON_ArrayForEach(row, r->rows)
    {
        if (!cJSON_IsObject(row)) return kvb_fail(err, KVB_FORMAT, "%s: rows[%zu]: expected an object", r->name, n);
        cJSON_ArrayForEach(cell, row)
        {
            if (cJSON_IsArray(cell) || cJSON_IsObject(cell))
                return kvb_fail(err, KVB_FORMAT, "%s: rows[%zu].%.60s: expected a number, a text, true, false or null",
                                r->name, n, cell->string);
        }
        n++;
    }
    return KVB_OK;
}

kvb_status results_parse(results_document *out, const char *text, size_t size, const char *name, kvb_error *err)
{
    static const cJSON nothing = {0};
    *out = (results_document){.name = name};
    kvb_status status = kvb_json_object(&out->document, text, size, name, "results", err);
    if (status != KVB_OK) return status;
    const struct {
        const char *key;
        const cJSON **field;
    } parts[] = {{"rows", &out->rows},
                 {"details", &out->details},
                 {"settings", &out->settings},
                 {"inputs", &out->inputs},
                 {"arguments", &out->arguments}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].field = cJSON_GetObjectItemCaseSensitive(out->document, parts[i].key);
        if (!*parts[i].field) *parts[i].field = &nothing;
    }
    out->command = results_text(out->document, "command");
    status = check_head(out, err);
    if (status == KVB_OK) status = check_rows(out, err);
    if (status != KVB_OK) results_close(out);
    return status;
}

kvb_status results_open(results_document *out, const char *path, kvb_error *err)
{
    *out = (results_document){0};
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    if (view.size > BYTES_MAX)
        status =
            kvb_fail(err, KVB_UNSUPPORTED, "%s: %zu bytes, expected results of at most %d", path, view.size, BYTES_MAX);
    else status = results_parse(out, (const char *)view.data, view.size, path, err);
    kvb_status whole = file_check(&view, path, err);
    file_unmap(&view);
    if (status == KVB_OK && whole != KVB_OK) results_close(out);
    return status == KVB_OK ? whole : status;
}

void results_close(results_document *r)
{
    cJSON_Delete(r->document);
    *r = (results_document){0};
}
