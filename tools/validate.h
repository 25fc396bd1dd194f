// The two halves of kvbudget validate: greedy, and tables, against the optimum (cmd_validate.c), and a table's stored
// bounds against the record (validate_certificate.c).
#pragma once
#include "tools/solve_job.h"

// Opens a table and the record, and takes from the table what was solved: metric, aggregation, scope, protection,
// constraints, ratios. Errors also: a record of another shape or model. *table is the caller's, also after a failure.
kvb_status open_table_and_record(solve_command *s, kvb_table **table, const char *path, kvb_error *err);

// Checks the table at `path` against the record of `s`, whose options give contexts and questions. Prints what was
// found. *holds: whether everything does. Errors: what keeps it from being checked.
kvb_status validate_certificate(solve_command *s, const char *path, bool *holds, kvb_error *err);
