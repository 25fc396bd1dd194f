#include "tools/report/results.h"
#include "formats/atomic_file.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
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

kvb_status results_begin(results *r, const char *command, kvb_error *err)
{
    cJSON *root = cJSON_CreateObject(), *arguments;
    *r = (results){.document = root};
    cJSON_AddStringToObject(root, "schema", RESULTS_SCHEMA);
    cJSON_AddNumberToObject(root, "schema_version", RESULTS_VERSION);
    cJSON_AddStringToObject(root, "tool_version", kvb_version());
    cJSON_AddStringToObject(root, "command", command);
    arguments = cJSON_AddArrayToObject(root, "arguments");
    for (int i = 0; i < words.count && arguments; i++)
        cJSON_AddItemToArray(arguments, cJSON_CreateString(words.items[i]));
    r->inputs = cJSON_AddArrayToObject(root, "inputs");
    r->settings = cJSON_AddObjectToObject(root, "settings");
    r->rows = cJSON_AddArrayToObject(root, "rows");
    r->details = cJSON_AddArrayToObject(root, "details");
    if (r->inputs && r->settings && r->rows && r->details) return KVB_OK;
    return kvb_fail(err, KVB_MEMORY, "no memory for the results of %s", command);
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
    if (cJSON_AddItemToArray(list, item)) return item;
    cJSON_Delete(item);
    return NULL;
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

// Numbers as the JSON document has them, so that both are the same ones. False: no memory.
static bool put_cell(FILE *out, const cJSON *cell)
{
    if (!cell || cJSON_IsNull(cell)) return true;
    if (cJSON_IsString(cell)) {
        put_text(out, cell->valuestring);
        return true;
    }
    char *text = cJSON_PrintUnformatted(cell);
    if (!text) return false;
    if (strcmp(text, "null") != 0) put_text(out, text); // what JSON makes of NaN
    cJSON_free(text);
    return true;
}

static bool put_csv(FILE *out, const cJSON *rows, const cJSON *columns)
{
    const cJSON *row, *column;
    bool good = true;
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
            good = good && put_cell(out, cJSON_GetObjectItemCaseSensitive(row, column->string));
        }
        putc('\n', out);
    }
    return good;
}

kvb_status results_write_csv(const results *r, const char *path, kvb_error *err)
{
    atomic_file file;
    cJSON *columns = cJSON_CreateObject();
    collect_columns(r->rows, columns);
    kvb_status status = columns && !json_ran_out() ? KVB_OK : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
    if (status == KVB_OK) status = atomic_file_begin(&file, path, err);
    if (status == KVB_OK && !put_csv(file.stream, r->rows, columns)) {
        atomic_file_abandon(&file);
        status = kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
    } else if (status == KVB_OK) status = atomic_file_commit(&file, err);
    cJSON_Delete(columns);
    return status;
}

// ---- JSON -----------------------------------------------------------------------------------------------------------

kvb_status results_print(const results *r, kvb_error *err)
{
    return json_print(r->document, err);
}

kvb_status results_write(const results *r, const char *path, kvb_error *err)
{
    char *text = json_text(r->document, err);
    if (!text) return KVB_MEMORY;
    atomic_file file;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status == KVB_OK) {
        fprintf(file.stream, "%s\n", text);
        status = atomic_file_commit(&file, err); // finds what went wrong with the stream
    }
    cJSON_free(text);
    return status;
}

kvb_status results_write_pair(const results *r, const char *name, kvb_error *err)
{
    size_t room = strlen(name) + 6;
    char *path = malloc(room);
    if (!path) return kvb_fail(err, KVB_MEMORY, "%s: no memory", name);
    snprintf(path, room, "%s.json", name);
    kvb_status status = results_write(r, path, err);
    snprintf(path, room, "%s.csv", name);
    if (status == KVB_OK) status = results_write_csv(r, path, err);
    free(path);
    return status;
}

kvb_status results_give(const results *r, bool json, const char *csv, kvb_error *err)
{
    kvb_status status = csv ? results_write_csv(r, csv, err) : KVB_OK;
    return status == KVB_OK && json ? results_print(r, err) : status;
}
