// What the files of `kvbudget task` share: the command line, and what was opened from it.
#pragma once
#include "evaluator/retrieval.h"
#include "evaluator/task_study.h"
#include "tools/methods.h"

typedef struct task_command {
    cli_list tasks;
    methods with;
    const char *output, *results, *head_scores, *haystack_path, *texts_path, *backend_name, *compute, *statistics;
    uint64_t tokens, count, seed, threads;
    bool answer, verbose, quiet, json;
    const backend *device;
    model *m;
    char *haystack;
    calib_file texts;
    cJSON *report;  // results of all tasks
    char *log_path; // NULL: none
    retrieval heads;
} task_command;

// What was found for one task: on the terminal, unless JSON is wanted there, and added to the report.
kvb_status task_report_add(task_command *c, const task_study *s, double tokens, kvb_error *err);
kvb_status task_report_print_json(const task_command *c, kvb_error *err); // the whole report
// NAME.json, NAME.csv and NAME.svg of the whole report.
kvb_status task_report_write(const task_command *c, kvb_error *err);
void task_report_answer(const task_command *c, const task_cell *cell, const task_sample *s, size_t question,
                        const task_turn *turn);
