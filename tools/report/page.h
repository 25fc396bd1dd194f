// The page of `kvbudget report`: one HTML file about tables, made from the tables, their records and results. It
// contains its own style and loads nothing from a network.
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

// Paths in these structs are borrowed.
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

// Opens everything and checks that it belongs together. Errors: those of the readers; KVB_ARGUMENT (too many files);
// KVB_MISMATCH (a record that none of the tables was made from). The caller frees, also after a failure.
kvb_status page_open(page *p, const page_paths *paths, kvb_error *err);
void page_free(page *p); // a zero struct is allowed

// Writes the page atomically. Fails with KVB_UNSUPPORTED if it would be larger than PAGE_BYTES_MAX; other errors are
// those of atomic_file.h.
kvb_status page_write(const page *p, const char *path, kvb_error *err);

// The lines of page.css, which the build turns into C; ends with NULL.
extern const char *const page_css[];
