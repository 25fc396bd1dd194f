// What is known of a study already: the log's results by key, and more that are added to it (log_file.h).
#pragma once
#include "evaluator/log_file.h"
#include "evaluator/task.h"
#include <stdbool.h>

// Of one cell on one sample.
typedef struct task_result {
    bool done;
    uint32_t n_questions;
    double *scores; // [n_questions], 0 to 1
    double kept;    // share of the context's entries in the cache before the question
    double looked;  // share of them that a policy attends to per step; NaN without one
} task_result;

typedef struct task_log {
    const char *path;         // NULL: nothing is known, nothing is kept
    log_file *file;           // NULL before task_log_open
    struct task_known *known; // sorted by key
    size_t n_known;
} task_log;

// Reads what there is and opens the file for more. The caller closes it, also after a failure. KVB_FORMAT names the
// line of a log that is none.
kvb_status task_log_open(task_log *log, const char *path, kvb_error *err);
// The first half of it, from bytes.
kvb_status task_log_parse(task_log *log, const char *text, size_t size, const char *path, kvb_error *err);
void task_log_close(task_log *log); // a zero struct is allowed; leaves it zero

// Takes the result of that name (64 characters) out of the log; false when there is none. Its scores then belong to the
// caller.
bool task_log_take(task_log *log, const char *key, task_result *out);
// Adds one; `about` is a line with whatever else is to stand there, which gets the key and the numbers.
kvb_status task_log_add(task_log *log, const char *key, const task_result *r, cJSON *about, kvb_error *err);
