// The results of a command, in one form for all commands that print numbers: a JSON document with tidy rows, and the
// same rows as CSV (docs/output.md). Also reads such documents, and turns their rows into lines over the ratio.
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

// Sets the command line that every document of this process will state. argv must stay valid.
void results_remember(int argc, char **argv);

// Begins a document for a command ("solve"). The caller frees it.
results results_begin(const char *command);
void results_free(results *r); // a zero struct is allowed

// Adds an input, something that the numbers were computed from. kind: "record", "table", "model" or "text". sha256: of
// the file's bytes, of a model's weights, or of a text's tokens in use; "" if it is not known.
void results_input(results *r, const char *kind, const char *name, const char *sha256);
// Add a file with the hash of its bytes, and the record of a selection with the hash of what was read from it. Errors:
// those of reading.
kvb_status results_file(results *r, const char *kind, const char *path, kvb_error *err);
kvb_status results_record(results *r, const selection *from, kvb_error *err);
// Adds a row and returns it, without columns yet. Columns must be numbers, booleans or texts, one value each.
cJSON *results_row(results *r);
// Adds an empty object to the details, for what has more dimensions than a row, and returns it.
cJSON *results_detail(results *r);
// Adds three columns to a row: NAME, NAME_low and NAME_high. NaN becomes null.
void results_interval(cJSON *row, const char *name, interval x);

// Write the document, or its rows as CSV (RFC 4180; a header; an empty cell where a row has null or lacks the column),
// atomically. Errors: those of atomic_file.h.
kvb_status results_write(const results *r, const char *path, kvb_error *err);
kvb_status results_write_csv(const results *r, const char *path, kvb_error *err);
// Writes both, NAME.json and NAME.csv.
kvb_status results_write_pair(const results *r, const char *name, kvb_error *err);
// Does what a command's --json and --csv ask for: prints the document if `json`, and writes the rows to the file `csv`
// unless that is NULL.
kvb_status results_give(const results *r, bool json, const char *csv, kvb_error *err);

typedef struct results_document {
    const char *name;                                            // for messages; the caller's
    cJSON *document;                                             // owned
    const char *command;                                         // that printed it: "eval", "solve"
    const cJSON *rows, *details, *settings, *inputs, *arguments; // never NULL; rows are objects of single values
} results_document;

// Reads `size` bytes. KVB_FORMAT: not JSON, another schema, or a row that is not flat, with its place; KVB_VERSION;
// KVB_MEMORY. On failure *out is zero.
kvb_status results_parse(results_document *out, const char *text, size_t size, const char *name, kvb_error *err);
// The same for a file of at most 64 MiB. Further errors: KVB_IO, KVB_UNSUPPORTED (larger).
kvb_status results_open(results_document *out, const char *path, kvb_error *err);
void results_close(results_document *r); // a zero struct is allowed; leaves it zero

// Return a cell of a row: NaN or "" if the row has no such column, or null, or another kind of value there.
double results_number(const cJSON *row, const char *column);
const char *results_text(const cJSON *row, const char *column);
// Returns the interval in the columns NAME, NAME_low and NAME_high.
interval results_interval_at(const cJSON *row, const char *name);

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
    bool steps;         // true: only policies, which act at every step and may be called like metrics; false: others
    bool bare;          // true: only rows where nothing was protected; false: only the others
} grid_rows;

// Returns what a row ranks tokens or evicts by: its metric, policy or method; "" if it has none.
const char *results_method(const cJSON *row);
// Tells whether a row is one of them.
bool grid_has_row(const grid_rows *from, const cJSON *row);
// Fills a grid with a column's values, by the rows' allocators; names and ratios that do not fit are left out.
void results_grid_fill(results_grid *g, const grid_rows *from, const char *column);
