// kvbudget refine in two parts: the command line, and the result.
#pragma once
#include "evaluator/refine_bench.h"
#include "tools/cmd/eval_command.h"

typedef struct refine_command {
    eval_command e;
    cli_list select, test;
    const char *objective, *search, *start;
    bool worst, layers;
    uint64_t evaluations, patience;
    char **operands; // model, table and the texts of all sets
    size_t n_operands, n_calibration, n_select;
    char table_sha256[65];
    refine_table table;
    refine_bench bench;
    refine_task task;
    uint32_t n_start; // texts that the search's start was measured on
    refine_result best;
    double *kl[SET_COUNT]; // of each set (refine_bench_judge); NULL: not measured
} refine_command;

// Writes the best table so far with an account of how it was found, and prints what it gains. Where the search was
// stopped, nothing is written that is not better than what is there (refine_table_may_replace): *written.
kvb_status refine_write_result(const refine_command *c, bool stopped, bool *written, kvb_error *err);
