// A table's curve for kvpress: shared by `solve --npy` and `export`.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// The kvpress press that the metadata's metric is: as metric_parameters say, else as its scorer does; an empty object
// where there is none. NULL: no memory. The caller's.
cJSON *press_of_table(const cJSON *metadata);

// table_export_npy with that press; says on standard error what kvpress will do otherwise than the table.
kvb_status write_table_npy(const char *path, const kvb_table *table, const cJSON *metadata, kvb_error *err);
