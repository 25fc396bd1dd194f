// The page of `kvbudget report`: one HTML file about tables, from the tables themselves, their records and results.
// It holds its own style and asks no network for anything.
#pragma once
#include "formats/record.h"
#include "tools/report/results.h"
#include <stdbool.h>

enum { PAGE_TABLES_MAX = 16, PAGE_RECORDS_MAX = 16, PAGE_RESULTS_MAX = 64, PAGE_BYTES_MAX = 2000000 };

typedef struct page_record {
    const char *path;
    char sha256[65];
    record *file;
} page_record;

typedef struct page_table {
    const char *path;
    char sha256[65];
    kvb_table *file;
    cJSON *metadata;                    // flat object of strings
    bool knows_losses, knows_deviation; // an imported table may know neither
    const page_record *from;            // the record that it was made from; NULL: not given
} page_table;

// All paths are the caller's.
typedef struct page {
    page_table tables[PAGE_TABLES_MAX];
    page_record records[PAGE_RECORDS_MAX];
    results_document results[PAGE_RESULTS_MAX];
    size_t n_tables, n_records, n_results;
} page;

typedef struct page_paths {
    const char *const *tables, *const *records, *const *results;
    size_t n_tables, n_records, n_results;
} page_paths;

// Opens everything and sees whether it belongs together. Errors: those of the readers; KVB_ARGUMENT too many files;
// KVB_MISMATCH a record that no table was made from. The caller frees, also after a failure.
kvb_status page_open(page *p, const page_paths *paths, kvb_error *err);
void page_free(page *p); // a zero struct is allowed

// Writes the page, whole or not at all. KVB_UNSUPPORTED: it would be larger than PAGE_BYTES_MAX. Errors also:
// those of atomic_file.h.
kvb_status page_write(const page *p, const char *path, kvb_error *err);

// The style, lines that the build makes of page.css; ends with NULL.
extern const char *const page_css[];
