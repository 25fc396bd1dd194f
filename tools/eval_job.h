// What the files of `kvbudget eval` share: the command line, and what was opened from it.
#pragma once
#include "evaluator/summary.h"
#include "tools/methods.h"

typedef struct eval_command {
    const cli_command *self;
    methods with;
    const char *output, *kept, *backend_name, *compute, *bos, *pre, *statistics;
    uint64_t n_tokens, n_next, batch, threads, seed;
    bool no_protect, quiet, json, speed;
    const backend *device;
    // Opened.
    model *m;
    sweep_text *texts;
    size_t n_texts;
    sweep s;
    char *log_path;
    progress bar;
} eval_command;

// From operands and options to methods, ratios and texts. What is wrong with the command line is printed, and
// EXIT_USAGE returned; what is wrong with a file, EXIT_FAILED.
int eval_open_inputs(eval_command *e, char **operands, size_t n);
void eval_free_inputs(eval_command *e);

// NAME.json, NAME.csv and NAME.svg, each whole or not at all.
kvb_status eval_write_results(const eval_command *e, const sweep_summary *rows, size_t n, kvb_error *err);
cJSON *eval_results_json(const eval_command *e, const sweep_summary *rows, size_t n); // NULL when memory is short
void eval_print_table(const eval_command *e, const sweep_summary *rows, size_t n);

// `--speed`: memory and decode speed of compacted caches against the full one.
kvb_status eval_measure_speed(eval_command *e, kvb_error *err);
