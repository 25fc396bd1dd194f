// kvbudget solve --lengths: whether tables serve contexts of other lengths than they were made from.
#pragma once
#include "tools/solve_job.h"

// Several records of the same contexts, cut to different lengths (profile --max-tokens): losses of tables from every
// length, and from all of them, on every other, the text that is judged being left out; and the transfer matrix between
// single texts at single lengths. s->records [s->n_records], of which s->path is the first and s->r is open.
kvb_status solve_lengths(solve_command *s, const char *metric, cJSON *list, kvb_error *err);
