// A table's curve for kvpress: shared by `solve --npy` and `export`.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// The kvpress press that the metadata's metric is: as metric_parameters say, else as its scorer does; an empty object
// where there is none. NULL: no memory. The caller's.
cJSON *press_of_table(const cJSON *metadata);

// table_export_npy with the press that the metadata's metric is: as metric_parameters say, else as its scorer does.
kvb_status write_table_npy(const char *path, uint32_t n_rows, uint32_t n_layers, uint32_t n_kv_heads,
                           const double *prune_ratio, const cJSON *metadata, kvb_error *err);
