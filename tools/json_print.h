// JSON on standard output: the one place that prints it.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>

// Counts failed allocations of cJSON from here on. Documents are made without a look at each: whether memory ran out
// for one of them is asked when it is printed, and by main at the end.
void json_watch_memory(void);
bool json_ran_out(void);

// Prints the document and a line end: indented, or all on one line. Bytes that are not UTF-8, as names of files may
// have, become '?'. KVB_MEMORY: nothing was printed; also for NULL,
// which is what making the document gives when memory is short.
kvb_status json_print(const cJSON *document, kvb_error *err);
kvb_status json_print_line(const cJSON *document, kvb_error *err);
