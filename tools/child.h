// A command of this program, run as a process of its own: it frees its memory when it ends, and stops, when asked to,
// as it does by itself.
#pragma once
#include "runtime/kvbudget.h"

// Runs `kvbudget argv[0] argv[1] ...`; argv ends with NULL. Its standard output goes to `output`, which is appended to
// (NULL: to ours), and its messages go where ours go. After cli_catch_signals() a signal to stop is passed on, once.
// KVB_INTERRUPTED: it was stopped so; KVB_IO: it could not be run, or ended with another status than 0, after its own
// message.
kvb_status child_run(char *const *argv, const char *output, kvb_error *err);
