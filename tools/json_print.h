// JSON on standard output: the one place that prints it.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>

// Counts failed allocations of cJSON from here on. Documents are made without a look at each: whether memory ran out
// for one of them is asked when it is printed, and by main at the end.
void json_watch_memory(void);
bool json_ran_out(void);

// calloc for what is made of a document and may be left out where it is empty: a failure shows in json_ran_out() too.
// The caller's to free.
void *json_calloc(size_t n, size_t size);
// Says so for memory that was asked for elsewhere.
void json_lacks_memory(void);

// The document as indented text, for cJSON_free(). Bytes that are not UTF-8, as names of files may have, become '?'.
// NULL, with KVB_MEMORY in *err, when memory is or was short; also for NULL, which is what making the document then
// gives.
char *json_text(const cJSON *document, kvb_error *err);
// Prints that text and a line end. KVB_MEMORY: nothing was printed.
kvb_status json_print(const cJSON *document, kvb_error *err);
