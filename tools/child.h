// Runs another command of this program as a process of its own, so that its memory is free when it ends and it handles
// signals as it always does.
#pragma once
#include "runtime/kvbudget.h"

// Runs `kvbudget argv[0] argv[1] ...` and waits for it to end.
//   argv    the command and its arguments, ending with NULL
//   output  a file to append its standard output to; NULL: it shares ours. It always shares our standard error.
// After cli_catch_signals(), a signal that asks us to stop is passed on to it, once. Fails with KVB_INTERRUPTED if that
// stopped it, and with KVB_IO if it could not be started or its exit status is not 0 (it has then printed why).
kvb_status child_run(char *const *argv, const char *output, kvb_error *err);
