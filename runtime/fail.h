// The one function that fills in an error, shared by every folder; not part of the public API.
#pragma once
#include "kvbudget.h"
#include <stdarg.h>

// Writes status and the formatted message to err (may be NULL) and returns status, so that callers can `return
// kvb_fail(...)`. A message longer than the buffer is cut, never overrun.
kvb_status kvb_fail(kvb_error *err, kvb_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));
