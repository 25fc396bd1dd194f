// A table for kvpress: NAME.npy (<f8, [R,L,G] prune ratios, what LUKVPress loads) and beside it NAME.json with all that
// the .npy cannot say: the table's metadata and the exact way to load it.
#pragma once
#include "formats/table_write.h"

// The metadata of a table file, a flat object of strings: the caller's, cJSON_Delete.
kvb_status table_metadata_read(cJSON **out, const char *path, kvb_error *err);

// Of the content, std and losses are not looked at. press: of its metric, {"press": "SnapKVPress", "arguments":
// {"window_size": 64}, "warning": ...}, as metric_press_of makes it (NULL or empty: there is none). Each file is
// written atomically; the side-car is written last and holds the SHA-256 of the .npy, so that a pair that does not
// belong together can be told. KVB_UNSUPPORTED: a table that has not a row for every per cent, which kvpress would
// misread.
kvb_status table_export_npy(const char *npy_path, const table_content *t, const cJSON *press, kvb_error *err);

// In which points LUKVPress will not do what the table says: another scorer, constraints that it ignores, rows that
// prune less than they are called. To be freed; empty when there are none.
char *table_kvpress_warning(const table_content *t, const cJSON *press);

// The Python lines that load such an .npy into kvpress: what the side-car's "load" is. To be freed.
char *table_kvpress_code(const char *npy_name, const cJSON *metadata, const cJSON *press);
