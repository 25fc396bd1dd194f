// What `solve` and `validate` print, as text and as rows of results (results.h). The print functions write to standard
// output, the warn functions to standard error.
#pragma once
#include "study/ablation.h"
#include "study/holdout.h"
#include "study/table.h"
#include "study/table_check.h"
#include "study/validation.h"
#include "study/versus.h"
#include "tools/report/results.h"

// Returns "layer by layer" or "over all layers".
const char *scope_words(solve_scope scope);
// Warns of questions that are left out, and of answers of different lengths, which are hard to compare.
void warn_of_pairs(const pair_set *p);

// Warns of the ratios at which the table loses more than uniform budgets.
void warn_of_table(const study_table *t);

void print_table(const study_table *t);
// Prints what the table and its rivals lose on left-out texts, and at which ratios a rival's budgets were taken.
void print_versus(const versus *v, const study_table *t);
void print_holdout(const holdout *h);
void print_ablation(const ablation *x);
void print_validation(const validation *v);

// Each adds one metric's rows to the results, and to their details what has more dimensions than a row.
void add_table(results *to, const study_table *t);
void add_holdout(results *to, const holdout *h);
void add_ablation(results *to, const ablation *x);
void add_validation(results *to, const validation *v);

// Reports a checked table. With `to` NULL it prints the rows whose bound or loss is wrong, and how many are right;
// otherwise it adds all rows to the results. *faults receives the number of wrong rows.
kvb_status report_table_check(const table_check *k, results *to, uint32_t *faults, kvb_error *err);
