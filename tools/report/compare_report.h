// The results of `eval` and `task`: printed, as a document (results.h), and as files.
#pragma once
#include "evaluator/method.h"
#include "evaluator/sweep.h"
#include "evaluator/task_study.h"
#include "tools/report/results.h"

// What a run compares, as far as its reports need it. Everything is borrowed.
typedef struct compared {
    method_list methods; // with their columns: a method under an allocator
    const allocator *allocators;
    size_t n_allocators;
    const double *ratios; // pruned shares, ascending
    size_t n_ratios;
} compared;

// Adds the setting "allocators" with each one's label and identity, and the tables among them as inputs.
void add_allocators(results *to, const compared *with);
// Writes NAME.json, NAME.csv and, if anything is compared, NAME.svg, each atomically.
kvb_status compared_write(const results *found, const char *name, kvb_error *err);

typedef struct eval_report {
    const sweep *s; // with its model, texts and options
    const backend *device;
    compared with;
    const sweep_summary *rows;
    size_t n_rows;
} eval_report;

void eval_report_print(const eval_report *r);
// Makes the results, which the caller frees.
results eval_report_results(const eval_report *r);

typedef struct task_report {
    const model *m;
    const backend *device;
    compared with;
    uint64_t seed;
    bool print, quiet; // print tables; print no hints
    results found;     // of all tasks so far; owned
} task_report;

// Begins r->found with what does not depend on tasks. The caller frees it.
void task_report_open(task_report *r);
// Adds the results of one task to r->found, and prints them if r->print. `tokens`: the mean length of its samples.
kvb_status task_report_add(task_report *r, const task_study *s, double tokens, kvb_error *err);
