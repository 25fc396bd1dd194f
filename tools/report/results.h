// What a command found, in one form for all commands that print numbers: a JSON document with tidy rows, and the same
// rows as CSV; how it is read again, and its rows as lines over the ratio. docs/output.md tells what stands in it.
#pragma once
#include "study/interval.h"
#include "study/selection.h"
#include <cjson/cJSON.h>
#include <stdbool.h>

#define RESULTS_SCHEMA "kvbudget-results"
enum { RESULTS_VERSION = 1 };

typedef struct results {
    cJSON *document;                           // owned
    cJSON *inputs, *settings, *rows, *details; // inside of it
} results;

// The words of the command line, for every document that this process begins. argv stays the caller's.
void results_remember(int argc, char **argv);

// An empty document of a command ("solve"). The caller frees it.
results results_begin(const char *command);
void results_free(results *r); // a zero struct is allowed

// A file that the numbers are from: "record", "table", "model" or "text". The SHA-256 is of its bytes; of a model of
// its weights, of a text of the tokens in use; "" where it is not known.
void results_input(results *r, const char *kind, const char *name, const char *sha256);
// A file that is there, with the hash of its bytes; and the record that is being read, with the hash of what was read.
// Errors: those of reading.
kvb_status results_file(results *r, const char *kind, const char *path, kvb_error *err);
kvb_status results_record(results *r, const selection *from, kvb_error *err);
// A row without columns. Columns are numbers, booleans and texts: a table of one value per cell is what tools expect.
cJSON *results_row(results *r);
// What has more dimensions than a row. An empty object at the end of the list.
cJSON *results_detail(results *r);
// Three columns: NAME, NAME_low and NAME_high. NaN is null.
void results_interval(cJSON *row, const char *name, interval x);

// Writes it, or its rows as CSV (RFC 4180, a header, empty where a row has no such column or null), whole or not at
// all. Errors: those of atomic_file.h.
kvb_status results_write(const results *r, const char *path, kvb_error *err);
kvb_status results_write_csv(const results *r, const char *path, kvb_error *err);
// NAME.json and NAME.csv.
kvb_status results_write_pair(const results *r, const char *name, kvb_error *err);
// What a command's --json and --csv ask for: prints the document, writes the CSV (NULL: no), or both.
kvb_status results_give(const results *r, bool json, const char *csv, kvb_error *err);

// ---- Reading --------------------------------------------------------------------------------------------------------

typedef struct results_document {
    const char *name;                                            // for messages; the caller's
    cJSON *document;                                             // owned
    const char *command;                                         // that printed it: "eval", "solve"
    const cJSON *rows, *details, *settings, *inputs, *arguments; // never NULL; rows are objects of single values
} results_document;

// Reads `size` bytes. KVB_FORMAT: not JSON, another schema, or a row that is not flat, with its place; KVB_VERSION;
// KVB_MEMORY. On failure *out is zero.
kvb_status results_parse(results_document *out, const char *text, size_t size, const char *name, kvb_error *err);
// The same of a file of at most 64 MiB. Errors also: KVB_IO, KVB_UNSUPPORTED (larger).
kvb_status results_open(results_document *out, const char *path, kvb_error *err);
void results_close(results_document *r); // a zero struct is allowed; leaves it zero

// A cell of a row: NaN and "" where the row has no such column, or null, or another kind of value.
double results_number(const cJSON *row, const char *column);
const char *results_text(const cJSON *row, const char *column);
// Of the columns NAME, NAME_low and NAME_high.
interval results_interval_at(const cJSON *row, const char *name);

// ---- Lines over the ratio -------------------------------------------------------------------------------------------

enum { GRID_NAMES_MAX = 24, GRID_RATIOS_MAX = 100 };

// One value per name and ratio, with its interval; NaN where there is none.
typedef struct results_grid {
    size_t n_names, n_ratios;
    const char *names[GRID_NAMES_MAX]; // in the order of the rows; they point into the document
    double ratios[GRID_RATIOS_MAX];    // ascending
    double value[GRID_NAMES_MAX][GRID_RATIOS_MAX], low[GRID_NAMES_MAX][GRID_RATIOS_MAX],
        high[GRID_NAMES_MAX][GRID_RATIOS_MAX];
    bool has_intervals;
} results_grid;

// Which rows count.
typedef struct grid_rows {
    const cJSON *rows;
    const char *method; // "keydiff": what results_method() gives; NULL: all
    const char *task;   // NULL: rows without one
    bool steps;         // of policies, which act at every step and may be called like metrics
    bool bare;          // of rows with sinks and window, or of those where nothing was protected
} grid_rows;

// What a row ranks tokens or evicts by: its metric, policy or method; "" where it has none.
const char *results_method(const cJSON *row);
// Whether a row is one of them.
bool grid_has_row(const grid_rows *from, const cJSON *row);
// The values of a column, by the row's allocator; names and ratios that do not fit are left out.
void results_grid_fill(results_grid *g, const grid_rows *from, const char *column);
