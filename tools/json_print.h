// JSON on standard output: the one place that prints it.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>

// Counts failed allocations of cJSON from here on. Documents are made without a look at each: whether memory ran out
// for one of them is asked when it is printed, and by main at the end.
void json_watch_memory(void);
bool json_ran_out(void);

// The document as indented text, for cJSON_free(). Bytes that are not UTF-8, as names of files may have, become '?'.
// NULL, with KVB_MEMORY in *err, when memory is or was short; also for NULL, which is what making the document then
// gives.
char *json_text(const cJSON *document, kvb_error *err);
// Prints that text and a line end. KVB_MEMORY: nothing was printed.
kvb_status json_print(const cJSON *document, kvb_error *err);
