// What `kvbudget task` found: on the terminal, as one JSON document of all tasks, and as files.
#pragma once
#include "evaluator/task_study.h"
#include "tools/report/compared.h"
#include <cjson/cJSON.h>

typedef struct task_report {
    const model *m;
    const backend *device;
    compared with;
    uint64_t seed, tokens; // tokens: of the contexts, as asked for
    bool print, quiet;     // whether to print tables; no hints
    cJSON *document;       // of all tasks so far; NULL before the first one. Owned
} task_report;

// What was found for one task: printed, if that is wanted, and added to the document. tokens: mean of its samples.
kvb_status task_report_add(task_report *r, const task_study *s, double tokens, kvb_error *err);
// NAME.json, NAME.csv and, where something is compared, NAME.svg of the whole document.
kvb_status task_report_write(const task_report *r, const char *name, kvb_error *err);
// Prints one answer.
void task_report_answer(const task_report *r, const task_cell *cell, const task_sample *s, size_t question,
                        const task_turn *turn);
