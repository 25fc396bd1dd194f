// What `kvbudget task` found: on the terminal, as the results of all tasks, and as files.
#pragma once
#include "evaluator/task_study.h"
#include "tools/report/compared.h"
#include "tools/report/results.h"

typedef struct task_report {
    const model *m;
    const backend *device;
    compared with;
    uint64_t seed, tokens; // tokens: of the contexts, as asked for
    bool print, quiet;     // whether to print tables; no hints
    results found;         // of all tasks so far; owned
} task_report;

// Begins the results with what does not depend on tasks. The caller frees them.
void task_report_open(task_report *r);
// What was found for one task: printed, if that is wanted, and added to the results. tokens: mean of its samples.
kvb_status task_report_add(task_report *r, const task_study *s, double tokens, kvb_error *err);
// NAME.json, NAME.csv and, where something is compared, NAME.svg of the whole document.
kvb_status task_report_write(const task_report *r, const char *name, kvb_error *err);
// Prints one answer.
void task_report_answer(const task_report *r, const task_cell *cell, const task_sample *s, size_t question,
                        const task_turn *turn);
