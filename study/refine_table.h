// Refined versions of a table: other prune ratios under the same constraints, with everything else unchanged.
#pragma once
#include "formats/table_write.h"
#include "study/options.h"
#include "study/shift.h"

typedef struct refine_table {
    table_content content; // the open table's own numbers; its metadata are owned
    rank_content ranking;  // of a learned metric; the table's
    study_options options;
    kvb_limits limits;
    shift_base base;
} refine_table;

// Uses the open table's numbers, so the table must outlive *t; its metadata are read from the file at `path`. The
// caller frees, also after a failure. Errors: those of study_options_from_table(), KVB_IO, KVB_MEMORY.
kvb_status refine_table_open(refine_table *t, const kvb_table *table, const char *path, kvb_error *err);
void refine_table_free(refine_table *t); // a zero struct is allowed

// Makes the table with the shifts [n_knots, L*G] of shift.h, as an engine would open it; the caller closes it.
kvb_status refine_table_apply(const refine_table *t, const double *knots, uint32_t n_knots, const double *shift,
                              kvb_table **out, kvb_error *err);
// Writes that table, with `about`, an account of how it was found, as metadata "refined". Bounds and multipliers are
// kept, because they hold for any budgets with these totals; the table's own loss on the record is marked as unknown.
kvb_status refine_table_write(const refine_table *t, const double *knots, uint32_t n_knots, const double *shift,
                              const cJSON *about, const char *path, kvb_error *err);
