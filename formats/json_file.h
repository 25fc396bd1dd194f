// JSON files beside others.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// Writes a value as text with a newline at its end, atomically. `value` may be NULL: memory ran out where it was made.
kvb_status json_write(const char *path, const cJSON *value, kvb_error *err);
