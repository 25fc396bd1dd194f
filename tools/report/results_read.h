// Documents of results (results.h, docs/output.md) as they are read again.
#pragma once
#include "runtime/kvbudget.h"
#include "study/interval.h"
#include <cjson/cJSON.h>
#include <stddef.h>

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
