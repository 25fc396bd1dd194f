#include "tools/report/inspect_results.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "tools/report/results_read.h"
#include <string.h>

// Whether `text` stands in the first bytes.
static bool begins_about(const char *data, size_t size, const char *text)
{
    enum { LOOKED_AT = 256 };
    return memmem(data, size < LOOKED_AT ? size : LOOKED_AT, text, strlen(text)) != NULL;
}

static bool begins(const char *data, size_t size, const char *text)
{
    return size >= strlen(text) && memcmp(data, text, strlen(text)) == 0;
}

static bool is_document(const char *data, size_t size)
{
    return begins_about(data, size, "\"schema\"") && begins_about(data, size, "kvbudget-results");
}

static bool is_csv(const char *data, size_t size)
{
    return begins(data, size, "metric,") || begins(data, size, "task,");
}

static bool is_log(const char *data, size_t size)
{
    return begins(data, size, "{\"key\":");
}

static bool is_picture(const char *data, size_t size)
{
    return begins_about(data, size, "<svg ");
}

bool is_results(const char *data, size_t size)
{
    return is_document(data, size) || is_csv(data, size) || is_log(data, size) || is_picture(data, size);
}

// An object as an ordered set: columns in the order of their first appearance.
static void add_columns(cJSON *list, const cJSON *rows)
{
    const cJSON *row, *cell;
    cJSON *seen = cJSON_CreateObject();
    cJSON_ArrayForEach(row, rows)
    {
        cJSON_ArrayForEach(cell, row)
        {
            if (cJSON_GetObjectItemCaseSensitive(seen, cell->string)) continue;
            cJSON_AddNullToObject(seen, cell->string);
            cJSON_AddItemToArray(list, cJSON_CreateString(cell->string));
        }
    }
    cJSON_Delete(seen);
}

static kvb_status inspect_document(cJSON *doc, const char *data, size_t size, const char *path, kvb_error *err)
{
    results_document r;
    kvb_status status = results_parse(&r, data, size, path, err);
    if (status != KVB_OK) return status;
    cJSON_AddStringToObject(doc, "command", r.command);
    cJSON_AddItemToObject(doc, "arguments", cJSON_Duplicate(r.arguments, true));
    cJSON_AddItemToObject(doc, "inputs", cJSON_Duplicate(r.inputs, true));
    cJSON_AddNumberToObject(doc, "n_rows", cJSON_GetArraySize(r.rows));
    add_columns(cJSON_AddArrayToObject(doc, "columns"), r.rows);
    results_close(&r);
    return KVB_OK;
}

static void add_text(cJSON *to, const char *text, size_t length)
{
    char copy[256];
    size_t n = length < sizeof copy ? length : sizeof copy - 1;
    memcpy(copy, text, n);
    copy[n] = '\0';
    cJSON_AddItemToArray(to, cJSON_CreateString(copy));
}

static void inspect_csv(cJSON *doc, const char *data, size_t size)
{
    const char *end = memchr(data, '\n', size), *from = data;
    size_t header = end ? (size_t)(end - data) : size, lines = 0;
    cJSON *columns = cJSON_AddArrayToObject(doc, "columns");
    for (size_t i = 0; i <= header; i++)
        if (i == header || data[i] == ',') {
            add_text(columns, from, (size_t)(data + i - from));
            from = data + i + 1;
        }
    for (size_t i = header; i < size; i++) lines += data[i] == '\n';
    cJSON_AddNumberToObject(doc, "n_rows", lines > 0 ? (double)lines - 1 : 0);
}

// The last line may be cut: the process that wrote it was killed.
static kvb_status inspect_log(cJSON *doc, const char *data, size_t size, const char *path, kvb_error *err)
{
    size_t n = 0, from = 0;
    for (const char *end; (end = memchr(data + from, '\n', size - from)); n++) {
        bool no_memory;
        size_t length = (size_t)(end - data) - from;
        cJSON *line = kvb_json_parse(data + from, length, NULL, &no_memory);
        cJSON_Delete(line);
        if (no_memory) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
        if (!line)
            return kvb_fail(err, KVB_FORMAT, "%s: line %zu: expected a JSON object of eval's or task's log, found none",
                            path, n + 1);
        from += length + 1;
    }
    cJSON_AddNumberToObject(doc, "n_results", (double)n);
    cJSON_AddBoolToObject(doc, "last_line_cut", from < size);
    return KVB_OK;
}

static void inspect_picture(cJSON *doc, const char *data, size_t size)
{
    const char *begin = memmem(data, size, "<title>", 7),
               *end = begin ? memchr(begin + 7, '<', size - (size_t)(begin + 7 - data)) : NULL;
    cJSON *titles = cJSON_AddArrayToObject(doc, "title");
    if (end) add_text(titles, begin + 7, (size_t)(end - begin) - 7);
}

kvb_status inspect_results(cJSON *doc, const char *data, size_t size, const char *path, kvb_error *err)
{
    if (is_document(data, size)) {
        cJSON_AddStringToObject(doc, "kind", "results");
        return inspect_document(doc, data, size, path, err);
    }
    if (is_log(data, size)) {
        cJSON_AddStringToObject(doc, "kind", "log of results");
        return inspect_log(doc, data, size, path, err);
    }
    bool picture = is_picture(data, size);
    cJSON_AddStringToObject(doc, "kind", picture ? "picture" : "results as CSV");
    if (picture) inspect_picture(doc, data, size);
    else inspect_csv(doc, data, size);
    return KVB_OK;
}
