// A log of results by key: in memory, and as one JSON object per line in a file from which a stopped run resumes. Each
// line is on disk before the next is begun. An incomplete last line, left by a kill, is ignored on reading and removed
// before anything is added. Each line ends with its own checksum (json_sealed_line), so damaged numbers are never used.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct log_file log_file;

enum { LOG_KEY = 65 }; // a SHA-256 as text: of all that a result depends on

// Reads the file, if it exists, and locks it for adding; with path NULL the log is in memory only. Errors: KVB_IO, also
// if another process has it locked; KVB_FORMAT, with the line's number, if a line is no result or its checksum is
// wrong. On failure *out is NULL.
kvb_status log_open(log_file **out, const char *path, kvb_error *err);
// Adds results from the lines in memory without checking their checksums; `path` is for messages.
kvb_status log_parse(log_file *log, const char *text, size_t size, const char *path, kvb_error *err);
// Closes the log. Returns `status`, or KVB_IO if `status` is KVB_OK and closing failed. `log` may be NULL.
kvb_status log_close(log_file *log, kvb_status status, kvb_error *err);

// Returns the result under that key, or NULL if there is none. Valid until the log is closed. `log` may be NULL.
const cJSON *log_find(const log_file *log, const char *key);
// Fails with KVB_FORMAT: for a caller that finds the line under that key incomplete.
kvb_status log_refuse(const log_file *log, const char *key, kvb_error *err);
// Adds n lines, each an object with a "key", and frees them; they are on disk when this returns.
kvb_status log_add(log_file *log, cJSON *const *lines, size_t n, kvb_error *err);

// Returns a number of a line, or NaN if it is missing, null or not a number.
double log_number(const cJSON *line, const char *name);
// Reads a list of exactly n numbers; returns false for anything else.
bool log_numbers(double *out, uint32_t n, const cJSON *line, const char *name);
// Add numbers with all their digits, so that reading them gives the same bits; NaN becomes null.
void log_put_number(cJSON *line, const char *name, double x);
void log_put_numbers(cJSON *line, const char *name, const double *x, uint32_t n);
