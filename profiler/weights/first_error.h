// For readers that continue after an error and report the first one.
#pragma once
#include "runtime/fail.h"

// Stores an error in r->status and r->err, unless there already is one.
#define KEEP_ERROR(r, code, ...)                                                        \
    do {                                                                                \
        if ((r)->status == KVB_OK) (r)->status = kvb_fail((r)->err, code, __VA_ARGS__); \
    } while (0)
