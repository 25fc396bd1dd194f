// What cuts have cost so far, by key: in memory, and in a log that a stopped search goes on from.
#pragma once
#include "evaluator/damage.h"

typedef struct damage_log damage_log;

enum { DAMAGE_KEY = 65 }; // a SHA-256 as text: of all that the damage of a cut depends on

// Reads what the log at `path` has and opens it for more (NULL: memory alone). Errors: KVB_FORMAT a file that is none,
// KVB_IO, also when another process holds it. On failure *out is NULL.
kvb_status damage_log_open(damage_log **out, const char *path, kvb_error *err);
// Returns `status`, or KVB_IO when that was no failure and closing is one. NULL is allowed.
kvb_status damage_log_close(damage_log *log, kvb_status status, kvb_error *err);
// NULL: not known. Valid until the log is closed.
const damage_value *damage_log_find(const damage_log *log, const char *key);
// Adds n values under keys [n][DAMAGE_KEY]; they are on disk when this returns.
kvb_status damage_log_add(damage_log *log, const char (*keys)[DAMAGE_KEY], const damage_value *values, uint32_t n,
                          kvb_error *err);
// Takes the lines of a log from bytes; `path` stands in messages.
kvb_status damage_log_parse(damage_log *log, const char *text, size_t size, const char *path, kvb_error *err);
