// The last step of a table's way: what is written of it.
#pragma once
#include "study/table.h"

// The metadata of a solved table's file (formats/README.md), a flat object of strings: the caller's, cJSON_Delete.
// KVB_IO: the record was changed since it was opened.
kvb_status study_table_describe(const study_table *t, cJSON **metadata, kvb_error *err);
// Each writes atomically: the table; every pair's own budgets, which the table
// must have been opened with.
kvb_status study_table_write(const study_table *t, const cJSON *metadata, const char *path, kvb_error *err);
kvb_status study_table_write_budgets(const study_table *t, const char *path, kvb_error *err);

// The JSON object of a table's metadata "constraints", as runtime/limits.h reads it; to be freed with cJSON_free. NULL:
// no memory.
char *limits_text(const kvb_limits *limits);
