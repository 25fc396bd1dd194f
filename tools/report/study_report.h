// What the commands on records print as text and add to their results.
#pragma once
#include "study/ablation.h"
#include "study/holdout.h"
#include "study/table.h"
#include "study/table_check.h"
#include "study/validation.h"
#include "study/versus.h"
#include "tools/report/results.h"

// "layer by layer" or "over all layers".
const char *scope_words(solve_scope scope);
// Tells of questions that are left out or hard to compare; on standard error.
void warn_of_pairs(const pair_set *p);

// Tells where the table loses to uniform budgets; on standard error.
void warn_of_table(const study_table *t);

void print_table(const study_table *t);
// What the table and its rivals lose on left-out texts, and where a rival's budgets were taken.
void print_versus(const versus *v, const study_table *t);
void print_holdout(const holdout *h);
void print_ablation(const ablation *x);
void print_validation(const validation *v);

// Rows of a metric, and beside them what has more dimensions.
void add_table(results *to, const study_table *t);
void add_holdout(results *to, const holdout *h);
void add_ablation(results *to, const ablation *x);
void add_validation(results *to, const validation *v);

// Prints all rows that do not hold, or, with results, adds all rows, and how many hold. *faults: how many do not.
kvb_status report_table_check(const table_check *k, results *to, uint32_t *faults, kvb_error *err);
