#include "tools/report/results.h"
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "tools/json_print.h"
#include <math.h>
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
    json_put(root, "schema %s schema_version %u tool_version %s command %s", RESULTS_SCHEMA, RESULTS_VERSION,
             kvb_version(), command);
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

// Appends an empty object to a list and returns it.
static cJSON *append_object(cJSON *list)
{
    cJSON *item = cJSON_CreateObject();
    cJSON_AddItemToArray(list, item);
    return item;
}

void results_input(results *r, const char *kind, const char *name, const char *sha256)
{
    cJSON *item = append_object(r->inputs);
    json_put(item, "kind %s name %s sha256 %s", kind, name, sha256);
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
    return append_object(r->rows);
}

cJSON *results_detail(results *r)
{
    return append_object(r->details);
}

void results_interval(cJSON *row, const char *name, interval x)
{
    char bound[80];
    cJSON_AddNumberToObject(row, name, x.value);
    snprintf(bound, sizeof bound, "%s_low", name);
    cJSON_AddNumberToObject(row, bound, x.low);
    snprintf(bound, sizeof bound, "%s_high", name);
    cJSON_AddNumberToObject(row, bound, x.high);
}

// ---- CSV ------------------------------------------------------------------------------------------------------------

// Lists the columns of rows, each once, in the order of first appearance, as an object of nulls that the caller frees.
static cJSON *list_columns(const cJSON *rows)
{
    const cJSON *row, *cell;
    cJSON *columns = cJSON_CreateObject();
    cJSON_ArrayForEach(row, rows)
    {
        cJSON_ArrayForEach(cell, row)
        {
            if (!cJSON_GetObjectItemCaseSensitive(columns, cell->string)) cJSON_AddNullToObject(columns, cell->string);
        }
    }
    return columns;
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

// Writes a cell, with numbers as the JSON document has them, so that both are the same.
static void put_cell(FILE *out, const cJSON *cell)
{
    if (!cell || cJSON_IsNull(cell)) return;
    if (cJSON_IsString(cell)) {
        put_text(out, cell->valuestring);
        return;
    }
    char *text = cJSON_PrintUnformatted(cell);
    if (strcmp(text, "null") != 0) put_text(out, text); // NaN prints as null
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
    cJSON *columns = list_columns(r->rows);
    put_csv(file.stream, r->rows, columns);
    cJSON_Delete(columns);
    return atomic_file_commit(&file, err); // reports the stream's write errors too
}

// ---- JSON -----------------------------------------------------------------------------------------------------------

kvb_status results_write(const results *r, const char *path, kvb_error *err)
{
    atomic_file file;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    char *text = json_to_text(r->document);
    fprintf(file.stream, "%s\n", text);
    cJSON_free(text);
    return atomic_file_commit(&file, err);
}

kvb_status results_write_pair(const results *r, const char *name, kvb_error *err)
{
    char *json = need_text("%s.json", name), *csv = need_text("%s.csv", name);
    kvb_status status = results_write(r, json, err);
    if (status == KVB_OK) status = results_write_csv(r, csv, err);
    free_all(json, csv);
    return status;
}

kvb_status results_give(const results *r, bool json, const char *csv, kvb_error *err)
{
    kvb_status status = csv ? results_write_csv(r, csv, err) : KVB_OK;
    if (status == KVB_OK && json) json_print(r->document);
    return status;
}

// ---- Reading --------------------------------------------------------------------------------------------------------

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

static kvb_status check_schema(const results_document *r, kvb_error *err)
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

static kvb_status check_result_rows(const results_document *r, kvb_error *err)
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
    status = check_schema(out, err);
    if (status == KVB_OK) status = check_result_rows(out, err);
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

// ---- Lines over the ratio -------------------------------------------------------------------------------------------

const char *results_method(const cJSON *row)
{
    static const char *const columns[] = {"metric", "policy", "method"};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        const char *text = results_text(row, columns[i]);
        if (*text) return text;
    }
    return "";
}

bool grid_has_row(const grid_rows *from, const cJSON *row)
{
    if (from->method && strcmp(results_method(row), from->method) != 0) return false;
    if ((strcmp(results_text(row, "acts"), "every step") == 0) != from->steps) return false;
    if (strcmp(results_text(row, "task"), from->task ? from->task : "") != 0) return false;
    double kept = results_number(row, "sink") + results_number(row, "window"); // NaN: unknown, not bare
    return (kept == 0) == from->bare;
}

static size_t grid_find_name(const results_grid *g, const char *name)
{
    size_t i = 0;
    while (i < g->n_names && strcmp(g->names[i], name) != 0) i++;
    return i;
}

static size_t grid_find_ratio(const results_grid *g, double ratio)
{
    size_t i = 0;
    while (i < g->n_ratios && fabs(g->ratios[i] - ratio) > 1e-9) i++;
    return i;
}

// Adds a ratio unless it is there or does not fit; keeps the ratios ascending.
static void add_ratio(results_grid *g, double ratio)
{
    if (grid_find_ratio(g, ratio) < g->n_ratios) return;
    if (g->n_ratios == GRID_RATIOS_MAX) return;
    size_t i = g->n_ratios++;
    for (; i > 0 && g->ratios[i - 1] > ratio; i--) g->ratios[i] = g->ratios[i - 1];
    g->ratios[i] = ratio;
}

static void add_name(results_grid *g, const char *name)
{
    if (grid_find_name(g, name) == g->n_names && g->n_names < GRID_NAMES_MAX) g->names[g->n_names++] = name;
}

void results_grid_fill(results_grid *g, const grid_rows *from, const char *column)
{
    const cJSON *row;
    *g = (results_grid){0};
    cJSON_ArrayForEach(row, from->rows)
    {
        double ratio = results_number(row, "ratio");
        if (!grid_has_row(from, row) || isnan(ratio) || isnan(results_number(row, column))) continue;
        add_name(g, results_text(row, "allocator"));
        add_ratio(g, ratio);
    }
    for (size_t i = 0; i < GRID_NAMES_MAX; i++)
        for (size_t k = 0; k < GRID_RATIOS_MAX; k++) g->value[i][k] = g->low[i][k] = g->high[i][k] = NAN;
    cJSON_ArrayForEach(row, from->rows)
    {
        if (!grid_has_row(from, row)) continue;
        size_t i = grid_find_name(g, results_text(row, "allocator")),
               k = grid_find_ratio(g, results_number(row, "ratio"));
        if (i == g->n_names || k == g->n_ratios) continue;
        interval x = results_interval_at(row, column);
        if (isnan(x.value)) continue;
        g->value[i][k] = x.value;
        g->low[i][k] = x.low;
        g->high[i][k] = x.high;
        g->has_intervals = g->has_intervals || !isnan(x.low);
    }
}
