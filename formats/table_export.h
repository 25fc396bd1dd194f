// A table for kvpress: NAME.npy (<f8, [R,L,G] prune ratios, what LUKVPress loads) and beside it NAME.json with what the
// .npy cannot hold: the table's metadata and how to load it.
#pragma once
#include "formats/table_write.h"

// Reads the metadata of a table file, a flat object of strings; the caller frees it with cJSON_Delete.
kvb_status table_metadata_read(cJSON **out, const char *path, kvb_error *err);

// Writes both files; std and losses of the content are not used. press: kvpress's class for the metric, {"press":
// "SnapKVPress", "arguments": {"window_size": 64}, "warning": ...}, as metric_press_of makes it (NULL or empty if there
// is none). Each file is written atomically; the side-car is written last and holds the SHA-256 of the .npy, so that a
// mismatched pair can be recognised. Fails with KVB_UNSUPPORTED if the table does not have a row for every per cent,
// since kvpress would misread it.
kvb_status table_export_npy(const char *npy_path, const table_content *t, const cJSON *press, kvb_error *err);

// Describes where LUKVPress will not do what the table says: another scorer, constraints that it ignores, rows that
// prune less than their ratio. Empty if there is nothing to warn of; the caller frees it.
char *table_kvpress_warning(const table_content *t, const cJSON *press);

// Returns the Python lines that load such an .npy into kvpress, the side-car's "load". The caller frees them.
char *table_kvpress_code(const char *npy_name, const cJSON *metadata, const cJSON *press);
