#include "tools/report/results.h"
#include "formats/atomic_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "tools/json_print.h"
#include <stdlib.h>
#include <string.h>

static struct {
    int count;
    char **items;
} words;

void results_remember(int argc, char **argv)
{
    words.count = argc;
    words.items = argv;
}

results results_begin(const char *command)
{
    cJSON *root = cJSON_CreateObject(), *arguments;
    results r = {.document = root};
    cJSON_AddStringToObject(root, "schema", RESULTS_SCHEMA);
    cJSON_AddNumberToObject(root, "schema_version", RESULTS_VERSION);
    cJSON_AddStringToObject(root, "tool_version", kvb_version());
    cJSON_AddStringToObject(root, "command", command);
    arguments = cJSON_AddArrayToObject(root, "arguments");
    for (int i = 0; i < words.count; i++) cJSON_AddItemToArray(arguments, cJSON_CreateString(words.items[i]));
    r.inputs = cJSON_AddArrayToObject(root, "inputs");
    r.settings = cJSON_AddObjectToObject(root, "settings");
    r.rows = cJSON_AddArrayToObject(root, "rows");
    r.details = cJSON_AddArrayToObject(root, "details");
    return r;
}

void results_free(results *r)
{
    cJSON_Delete(r->document);
    *r = (results){0};
}

// An empty object at the end of a list.
static cJSON *append(cJSON *list)
{
    cJSON *item = cJSON_CreateObject();
    cJSON_AddItemToArray(list, item);
    return item;
}

void results_input(results *r, const char *kind, const char *name, const char *sha256)
{
    cJSON *item = append(r->inputs);
    cJSON_AddStringToObject(item, "kind", kind);
    cJSON_AddStringToObject(item, "name", name);
    cJSON_AddStringToObject(item, "sha256", sha256);
}

kvb_status results_file(results *r, const char *kind, const char *path, kvb_error *err)
{
    char sha256[65];
    kvb_status status = sha256_file_hex(path, sha256, err);
    if (status == KVB_OK) results_input(r, kind, path, sha256);
    return status;
}

kvb_status results_record(results *r, const selection *from, kvb_error *err)
{
    char sha256[65];
    kvb_status status = record_file_sha256(from->r, sha256, err);
    if (status == KVB_OK) results_input(r, "record", from->path, sha256);
    return status;
}

cJSON *results_row(results *r)
{
    return append(r->rows);
}

cJSON *results_detail(results *r)
{
    return append(r->details);
}

void results_interval(cJSON *row, const char *name, double value, double low, double high)
{
    char bound[80];
    cJSON_AddNumberToObject(row, name, value);
    snprintf(bound, sizeof bound, "%s_low", name);
    cJSON_AddNumberToObject(row, bound, low);
    snprintf(bound, sizeof bound, "%s_high", name);
    cJSON_AddNumberToObject(row, bound, high);
}

// ---- CSV ------------------------------------------------------------------------------------------------------------

// Adds to `columns`, an object used as an ordered set, what each row is the first to have.
static void collect_columns(const cJSON *rows, cJSON *columns)
{
    const cJSON *row, *cell;
    cJSON_ArrayForEach(row, rows)
    {
        cJSON_ArrayForEach(cell, row)
        {
            if (!cJSON_GetObjectItemCaseSensitive(columns, cell->string)) cJSON_AddNullToObject(columns, cell->string);
        }
    }
}

static void put_text(FILE *out, const char *text)
{
    if (!text[strcspn(text, "\",\r\n")]) {
        fputs(text, out);
        return;
    }
    putc('"', out);
    for (; *text; text++) {
        if (*text == '"') putc('"', out);
        putc(*text, out);
    }
    putc('"', out);
}

// Numbers as the JSON document has them, so that both are the same ones.
static void put_cell(FILE *out, const cJSON *cell)
{
    if (!cell || cJSON_IsNull(cell)) return;
    if (cJSON_IsString(cell)) {
        put_text(out, cell->valuestring);
        return;
    }
    char *text = cJSON_PrintUnformatted(cell);
    if (strcmp(text, "null") != 0) put_text(out, text); // what JSON makes of NaN
    cJSON_free(text);
}

static void put_csv(FILE *out, const cJSON *rows, const cJSON *columns)
{
    const cJSON *row, *column;
    cJSON_ArrayForEach(column, columns)
    {
        if (column != columns->child) putc(',', out);
        put_text(out, column->string);
    }
    putc('\n', out);
    cJSON_ArrayForEach(row, rows)
    {
        cJSON_ArrayForEach(column, columns)
        {
            if (column != columns->child) putc(',', out);
            put_cell(out, cJSON_GetObjectItemCaseSensitive(row, column->string));
        }
        putc('\n', out);
    }
}

kvb_status results_write_csv(const results *r, const char *path, kvb_error *err)
{
    atomic_file file;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    cJSON *columns = cJSON_CreateObject();
    collect_columns(r->rows, columns);
    put_csv(file.stream, r->rows, columns);
    cJSON_Delete(columns);
    return atomic_file_commit(&file, err); // finds what went wrong with the stream
}

// ---- JSON -----------------------------------------------------------------------------------------------------------

void results_print(const results *r)
{
    json_print(r->document);
}

kvb_status results_write(const results *r, const char *path, kvb_error *err)
{
    atomic_file file;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    char *text = json_text(r->document);
    fprintf(file.stream, "%s\n", text);
    cJSON_free(text);
    return atomic_file_commit(&file, err);
}

kvb_status results_write_pair(const results *r, const char *name, kvb_error *err)
{
    char *json = need_text("%s.json", name), *csv = need_text("%s.csv", name);
    kvb_status status = results_write(r, json, err);
    if (status == KVB_OK) status = results_write_csv(r, csv, err);
    free(json);
    free(csv);
    return status;
}

kvb_status results_give(const results *r, bool json, const char *csv, kvb_error *err)
{
    kvb_status status = csv ? results_write_csv(r, csv, err) : KVB_OK;
    if (status == KVB_OK && json) results_print(r);
    return status;
}
