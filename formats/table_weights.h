// The metadata "text_weights" of tables made with worst or cvar: JSON text, for every row one weight of each text. They
// are the multipliers that prove the row's bound (solver/robust.h).
#pragma once
#include "runtime/kvbudget.h"
#include <stdint.h>

// weight [n_rows, n_texts]. `name` is the file for messages; cap: the most that a text may weigh, of a sum of 1.
// KVB_FORMAT when the text is anything else than n_rows arrays of n_texts numbers from 0 to cap with the sum 1.
kvb_status table_weights_parse(double *weight, const char *text, uint32_t n_rows, uint32_t n_texts, double cap,
                               const char *name, kvb_error *err);

// The other way; to be freed with cJSON_free. NULL: no memory.
char *table_weights_print(const double *weight, uint32_t n_rows, uint32_t n_texts);
