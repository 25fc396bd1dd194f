// The two halves of kvbudget validate: greedy against the optimum (cmd_validate.c), and a table's stored bounds against
// the record (validate_certificate.c).
#pragma once
#include "tools/solve_job.h"

// Checks the table at `path` against the record of `s`, whose options give contexts and questions. Prints what was
// found. *holds: whether everything does. Errors: what keeps it from being checked.
kvb_status validate_certificate(solve_command *s, const char *path, bool *holds, kvb_error *err);
