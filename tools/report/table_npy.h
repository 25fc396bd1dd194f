// Exports a table as the array that kvpress loads.
#pragma once
#include "formats/table_write.h"

// Returns the kvpress press that ranks as the table's metric does, with its arguments: from the metadata's
// metric_parameters, or else from the metric's row. An empty object if there is none; NULL without memory. The caller
// frees it with cJSON_Delete.
cJSON *press_of_table(const cJSON *metadata);

// Writes the array and its side-car (table_export_npy()) with that press, and warns on stderr of everything that
// kvpress will do differently from the table.
kvb_status write_table_npy(const char *path, const table_content *t, kvb_error *err);
