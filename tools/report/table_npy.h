// A table's curve for kvpress: shared by `solve --npy` and `export`.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// table_export_npy with the press that the metadata's metric is: as metric_parameters say, else as its scorer does.
kvb_status write_table_npy(const char *path, uint32_t n_rows, uint32_t n_layers, uint32_t n_kv_heads,
                           const double *prune_ratio, const cJSON *metadata, kvb_error *err);
