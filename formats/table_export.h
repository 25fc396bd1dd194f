// A table for kvpress: NAME.npy (<f8, [R,L,G] prune ratios, what LUKVPress loads) and beside it NAME.json with all that
// the .npy cannot say: the table's metadata and the exact way to load it.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdint.h>

// The metadata of a table file, a flat object of strings: the caller's, cJSON_Delete.
kvb_status table_metadata_read(cJSON **out, const char *path, kvb_error *err);

// Path of the side-car: ".npy" at the end replaced by ".json", else ".json" appended. malloc'd; NULL when memory is
// short.
char *table_sidecar_path(const char *npy_path);

// prune_ratio [n_rows,L,G] finite, in [0,1]; metadata: the table's (flat object of strings), copied; press: of its
// metric, {"press": "SnapKVPress", "arguments": {"window_size": 64}, "warning": ...}, as metric_press_of makes it (NULL
// or empty: there is none). Each file is written atomically; the side-car is written last and holds
// the SHA-256 of the .npy, so that a pair that does not belong together can be told.
kvb_status table_export_npy(const char *npy_path, uint32_t n_rows, uint32_t n_layers, uint32_t n_kv_heads,
                            const double *prune_ratio, const cJSON *metadata, const cJSON *press, kvb_error *err);

// The Python lines that load such an .npy into kvpress: what the side-car's "load" is. malloc'd; NULL when memory is
// short.
char *table_kvpress_code(const char *npy_name, const cJSON *metadata, const cJSON *press);

// Reads a side-car, or a file that holds nothing but such metadata: *metadata receives the flat object of strings (the
// caller's, cJSON_Delete). When npy_sha256 is not NULL and the side-car names a hash, the two must be equal
// (KVB_MISMATCH).
kvb_status table_sidecar_parse(cJSON **metadata, const void *data, size_t size, const char *name,
                               const char *npy_sha256, kvb_error *err);
