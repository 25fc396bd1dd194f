// Readers that go on after an error and report the first one.
#pragma once
#include "runtime/fail.h"

// Keeps an error in `status` and `err` of what r points to, unless there was one before.
#define KEEP_ERROR(r, code, ...)                                                        \
    do {                                                                                \
        if ((r)->status == KVB_OK) (r)->status = kvb_fail((r)->err, code, __VA_ARGS__); \
    } while (0)
