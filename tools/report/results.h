// What a command found, in one form for all commands that print numbers: a JSON document with tidy rows, and the same
// rows as CSV. docs/output.md tells what stands in it.
#pragma once
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
void results_interval(cJSON *row, const char *name, double value, double low, double high);

// Prints the document to standard output.
void results_print(const results *r);
// Writes it, or its rows as CSV (RFC 4180, a header, empty where a row has no such column or null), whole or not at
// all. Errors: those of atomic_file.h.
kvb_status results_write(const results *r, const char *path, kvb_error *err);
kvb_status results_write_csv(const results *r, const char *path, kvb_error *err);
// NAME.json and NAME.csv.
kvb_status results_write_pair(const results *r, const char *name, kvb_error *err);
// What a command's --json and --csv ask for: prints the document, writes the CSV (NULL: no), or both.
kvb_status results_give(const results *r, bool json, const char *csv, kvb_error *err);
