// Checks the bounds of a table against the record it was made from, with code that shares only the loss curves with the
// solver: solver/checker.h.
#pragma once
#include "study/formats.h"
#include "study/gather.h"

typedef struct table_check {
    const char *path; // of the table; the caller's
    kvb_table *table; // owned
    kvb_limits limits;
    study_options options; // what the table was solved for
    selection from;
    pair_set pairs;
    double *packing_loss;                 // [N, RECORD_PACKINGS] of a table with formats; owned
    double lambda[ROWS];                  // stored multipliers
    double bound[ROWS], table_loss[ROWS]; // recomputed: means over the problems, over the pairs
    double loss[ROWS];                    // recomputed, only for a table with formats
    bool too_large[ROWS];                 // likewise: the row exceeds its bytes
} table_check;

// Opens a table and the record that it belongs to, and takes the options and the metric from the table. wanted:
// contexts and questions; its metrics are not used. Errors: those of kvb_table_open(), study_options_from_table() and
// selection_open(); KVB_MISMATCH if the record has another shape or model. The caller frees the table, the limits and
// the selection, also after a failure.
kvb_status open_table_and_record(kvb_table **table, study_options *o, kvb_limits *limits, selection *from,
                                 const char *table_path, const char *record_path, const selection_request *wanted,
                                 kvb_error *err);

// Opens a check. Further errors: KVB_MISMATCH if the table was made from another record, or from other pairs of it;
// KVB_UNSUPPORTED if the table has no bounds. The caller frees, also after a failure.
kvb_status table_check_open(table_check *k, const char *table_path, const char *record_path,
                            const selection_request *wanted, kvb_error *err);
// Reads all pairs; fills bound and table_loss, and with formats also loss and too_large.
kvb_status table_check_run(table_check *k, study_progress *progress, kvb_error *err);
// Checks that the table respects its constraints at the length that it was solved for. Errors name the row.
kvb_status table_check_limits(const table_check *k, kvb_error *err);
// Returns what is wrong with a row of the table, or NULL.
const char *table_check_fault(const table_check *k, const kvb_row *row, uint32_t r);
void table_check_free(table_check *k);
