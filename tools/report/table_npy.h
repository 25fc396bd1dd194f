// A table's curve for kvpress.
#pragma once
#include "formats/table_write.h"

// The kvpress press that the metadata's metric is: as metric_parameters say, else as its scorer does; an empty object
// where there is none. NULL: no memory. The caller's.
cJSON *press_of_table(const cJSON *metadata);

// table_export_npy with that press; says on standard error what kvpress will do otherwise than the table.
kvb_status write_table_npy(const char *path, const table_content *t, kvb_error *err);
