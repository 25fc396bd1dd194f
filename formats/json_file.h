// JSON files beside others.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>

// Writes a value as text with a newline at its end, atomically. `value` may be NULL: memory ran out where it was made.
kvb_status json_write(const char *path, const cJSON *value, kvb_error *err);

// A number with all its digits: cJSON leaves out the 16th and 17th where it thinks that they do not matter, and then
// other bits are read back. NaN and infinity become null. NULL: no memory.
cJSON *json_exact(double x);
bool json_add_exact(cJSON *object, const char *name, double x);
