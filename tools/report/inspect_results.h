// What `kvbudget inspect` says of the files that eval and task write.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

// Whether `data` looks like one of them: results as JSON or CSV, a log of cells, a picture. It decides on few bytes;
// inspect_results() checks.
bool is_results(const char *data, size_t size);
// Adds kind, and of JSON command, inputs, columns and rows; of CSV columns and rows; of a log its lines; of a picture
// its title. Errors name `path`: those of results_parse(); KVB_FORMAT a line of a log that is no JSON; KVB_MEMORY.
kvb_status inspect_results(cJSON *doc, const char *data, size_t size, const char *path, kvb_error *err);
