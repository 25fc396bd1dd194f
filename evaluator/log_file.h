// Results so far, by key: in memory, and one JSON object per line in a file that a stopped run goes on from. Lines are
// written whole and are on disk before more is begun. A line that a kill cut short is dropped on reading and cut off
// before more is added. Each ends with its own checksum (json_sealed_line), so that no damaged number is taken over.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct log_file log_file;

enum { LOG_KEY = 65 }; // a SHA-256 as text: of all that a result depends on

// Reads what the file has and holds it for more; one that does not exist yet is empty (path NULL: memory alone).
// Errors: KVB_IO, also when another process holds it; KVB_FORMAT with the number of a line whose checksum is not its
// own, or that is no result. On failure *out is NULL.
kvb_status log_open(log_file **out, const char *path, kvb_error *err);
// Takes lines from bytes, whatever their checksums say; `path` stands in messages.
kvb_status log_parse(log_file *log, const char *text, size_t size, const char *path, kvb_error *err);
// Returns `status`, or KVB_IO when that was no failure and closing is one. NULL is allowed.
kvb_status log_close(log_file *log, kvb_status status, kvb_error *err);

// The result of that name, NULL: not known. Valid until the log is closed. `log` may be NULL.
const cJSON *log_find(const log_file *log, const char *key);
// KVB_FORMAT: the line of that name does not have all its numbers.
kvb_status log_refuse(const log_file *log, const char *key, kvb_error *err);
// Adds n lines, objects with a "key", and frees them; they are on disk when this returns.
kvb_status log_add(log_file *log, cJSON *const *lines, size_t n, kvb_error *err);

// Numbers of a line, as it is read and written. A missing or wrong one reads as NaN; so does null.
double log_number(const cJSON *line, const char *name);
// A list of exactly n numbers. False for anything else.
bool log_numbers(double *out, uint32_t n, const cJSON *line, const char *name);
// All digits, so that what is read back has the same bits; NaN becomes null.
void log_put_number(cJSON *line, const char *name, double x);
void log_put_numbers(cJSON *line, const char *name, const double *x, uint32_t n);
