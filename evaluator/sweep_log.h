// The log of a sweep: one line per cell (log_file.h).
#pragma once
#include "evaluator/log_file.h"
#include "evaluator/sweep.h"
#include <stdio.h>

// Fills every cell of the sweep whose key the log knows; a log that does not exist yet is empty. Lines of other sweeps
// are left alone. Errors: KVB_FORMAT with the line for anything that is not such a log; KVB_IO.
kvb_status sweep_log_read(sweep *s, kvb_error *err);
// The same from bytes.
kvb_status sweep_log_parse(sweep *s, const char *text, size_t size, const char *path, kvb_error *err);
// Adds a cell that is done.
kvb_status sweep_log_add(log_file *log, const sweep *s, const sweep_cell *cell, kvb_error *err);

// One line for tests/peer/eval_parity.py: ids of text and continuation, and the kept positions of every head.
kvb_status sweep_write_kept(FILE *out, const sweep *s, const sweep_cell *cell, const kept_set *kept, kvb_error *err);
