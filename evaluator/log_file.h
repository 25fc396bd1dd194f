// Results so far, one JSON object per line, each written whole and on disk before the next is begun: what a stopped run
// goes on from. A line that a kill cut short is dropped on reading and cut off before more is added. Each ends with its
// own checksum (json_sealed_line), so that no damaged number is taken over.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Told every whole line; `line` is NULL where it is no JSON, `number` counts from 1.
typedef struct log_reader {
    kvb_status (*take)(void *context, const cJSON *line, const char *path, uint32_t number, kvb_error *err);
    void *context;
} log_reader;

// A file that does not exist yet is empty. Errors: KVB_IO; KVB_FORMAT: a line whose checksum is not its own; the
// reader's.
kvb_status log_read(const char *path, const log_reader *reader, kvb_error *err);
// The same from bytes, whatever checksums say.
kvb_status log_parse(const char *text, size_t size, const char *path, const log_reader *reader, kvb_error *err);

typedef struct log_file log_file;

// Opens for appending, and holds it: KVB_IO when another process does.
kvb_status log_open(log_file **out, const char *path, kvb_error *err);
// Returns `status`, or KVB_IO when that was no failure and closing is one. NULL is allowed.
kvb_status log_close(log_file *log, kvb_status status, kvb_error *err);
// Adds a line (NULL: memory ran out where it was made); it is on disk when this returns.
kvb_status log_add(log_file *log, const cJSON *line, kvb_error *err);

// Numbers of a line, as it is read and written. A missing or wrong one reads as NaN; so does null.
double log_number(const cJSON *line, const char *name);
// A list of exactly n numbers; `gaps` lets null stand for NaN. False for anything else.
bool log_numbers(double *out, uint32_t n, const cJSON *line, const char *name, bool gaps);
// All digits, so that what is read back has the same bits; NaN becomes null.
bool log_put_number(cJSON *line, const char *name, double x);
bool log_put_numbers(cJSON *line, const char *name, const double *x, uint32_t n);
