// What `eval` and `task` found: on the terminal, as JSON, and as files.
#pragma once
#include "evaluator/method.h"
#include "evaluator/sweep.h"
#include "evaluator/task_study.h"
#include "tools/report/results.h"

// What a run compares, as its reports see it.
typedef struct compared {
    method_list methods; // with their columns: a method under an allocator
    const allocator *allocators;
    size_t n_allocators;
    const double *ratios; // pruned shares, ascending
    size_t n_ratios;
} compared;

// Adds the setting "allocators", how each is called and what it is, and the tables among them as inputs.
void add_allocators(results *to, const compared *with);
// NAME.json, NAME.csv and, where something is compared, NAME.svg, each whole or not at all.
kvb_status compared_write(const results *found, const char *name, kvb_error *err);

// ---- eval -----------------------------------------------------------------------------------------------------------

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

// ---- task -----------------------------------------------------------------------------------------------------------

typedef struct task_report {
    const model *m;
    const backend *device;
    compared with;
    uint64_t seed;
    bool print, quiet; // whether to print tables; no hints
    results found;     // of all tasks so far; owned
} task_report;

// Begins the results with what does not depend on tasks. The caller frees them.
void task_report_open(task_report *r);
// What was found for one task: printed, if that is wanted, and added to the results. tokens: mean of its samples.
kvb_status task_report_add(task_report *r, const task_study *s, double tokens, kvb_error *err);
// Prints one answer.
void task_report_answer(const task_report *r, const task_cell *cell, const task_sample *s, size_t question,
                        const task_turn *turn);
