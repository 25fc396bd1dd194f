// What `kvbudget eval` found: on the terminal, as JSON, and as files.
#pragma once
#include "evaluator/summary.h"
#include "tools/report/compared.h"
#include <cjson/cJSON.h>

typedef struct eval_report {
    const sweep *s; // with its model, texts and options
    const backend *device;
    compared with;
    uint64_t seed; // of the bootstrap
    const sweep_summary *rows;
    size_t n_rows;
} eval_report;

void eval_report_print(const eval_report *r);
cJSON *eval_report_json(const eval_report *r); // NULL when memory is short
// NAME.json, NAME.csv and NAME.svg, each whole or not at all.
kvb_status eval_report_write(const eval_report *r, const char *name, kvb_error *err);
