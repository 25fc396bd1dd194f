// The log of a sweep: one JSON object per line, one line per cell, written whole. A line that a kill cut short is dropped on reading.
#pragma once
#include "evaluator/sweep.h"
#include <stdio.h>

typedef struct sweep_log sweep_log;

// Fills every cell of the sweep whose key the log knows; a log that does not exist yet is empty. Lines of other sweeps are left alone.
// Errors: KVB_FORMAT with the line for anything that is not such a log; KVB_IO.
kvb_status sweep_log_read(sweep *s, kvb_error *err);
// The same from bytes.
kvb_status sweep_log_parse(sweep *s, const char *text, size_t size, const char *path, kvb_error *err);

// Opens for appending, after cutting off an unfinished last line.
kvb_status sweep_log_open(sweep_log **out, const char *path, kvb_error *err);
kvb_status sweep_log_add(sweep_log *log, const sweep *s, const sweep_cell *cell,
                         kvb_error *err); // on disk when it returns
void sweep_log_close(sweep_log *log);

// One line for tools/peer/eval_parity.py: ids of text and continuation, and the kept positions of every head.
kvb_status sweep_write_kept(FILE *out, const sweep *s, const sweep_cell *cell, const kept_set *kept, kvb_error *err);
