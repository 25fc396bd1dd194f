// What `kvbudget eval` found: on the terminal, as JSON, and as files.
#pragma once
#include "evaluator/sweep.h"
#include "tools/report/compared.h"
#include "tools/report/results.h"

typedef struct eval_report {
    const sweep *s; // with its model, texts and options
    const backend *device;
    compared with;
    const sweep_summary *rows;
    size_t n_rows;
} eval_report;

void eval_report_print(const eval_report *r);
// The caller frees them.
results eval_report_results(const eval_report *r);
// NAME.json, NAME.csv and NAME.svg, each whole or not at all.
kvb_status eval_report_write(const eval_report *r, const results *found, const char *name, kvb_error *err);
