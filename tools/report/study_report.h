// What the commands on records print as text, add to a JSON list, and draw. Drawing writes a whole SVG.
#pragma once
#include "study/ablation.h"
#include "study/holdout.h"
#include "study/lengths.h"
#include "study/table.h"
#include "study/table_check.h"
#include "study/validation.h"
#include <cjson/cJSON.h>
#include <stdio.h>

// "layer by layer" or "over all layers".
const char *scope_words(solve_scope scope);
// Tells of questions that are left out or hard to compare; on standard error.
void warn_of_pairs(const pair_set *p);

void print_table(const study_table *t);
void print_holdout(const holdout *h);
void print_ablation(const ablation *x);
void print_lengths(const lengths *x);
void print_validation(const validation *v);

// KVB_MEMORY: the list is to be dropped.
kvb_status add_table(cJSON *list, const study_table *t, kvb_error *err);
kvb_status add_holdout(cJSON *list, const holdout *h, kvb_error *err);
kvb_status add_ablation(cJSON *list, const ablation *x, kvb_error *err);
kvb_status add_lengths(cJSON *list, const lengths *x, kvb_error *err);
kvb_status add_validation(cJSON *list, const validation *v, kvb_error *err);

void draw_holdout(const holdout *h, FILE *out);
void draw_ablation(const ablation *x, FILE *out);
void draw_lengths(const lengths *x, FILE *out);
void draw_validation(const validation *v, FILE *out);

// Prints all rows that do not hold, or, with json, all rows, and how many hold. *faults: how many do not.
kvb_status report_table_check(const table_check *k, bool json, uint32_t *faults, kvb_error *err);
