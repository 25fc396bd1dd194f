// The command line of solve and validate, in three parts: which part of the record, how to solve, what to write.
#pragma once
#include "study/progress.h"
#include "study/selection.h"
#include "tools/cli.h"
#include "tools/cmd/solve_constraints.h"

// Options of both commands, for their tables: which part of the record, and what is protected.
#define SELECTION_OPTIONS(l)                                                                                           \
    {"sink",    0,                                                                                                     \
     CLI_COUNT, &(l).options.sink,                                                                                     \
     "N",       "first tokens that are always kept (default: as recorded with the metric)"},                           \
        {"window",                                                                                                     \
         0,                                                                                                            \
         CLI_TEXT,                                                                                                     \
         &(l).words.window,                                                                                            \
         "N|auto",                                                                                                     \
         "last tokens that are always kept (default: as recorded with the metric); solve also\ntakes auto: the "       \
         "number that loses least"},                                                                                   \
        {"contexts", 'c', CLI_TEXT, &(l).wanted.contexts, "IDS", "use only these contexts, commas between"},           \
    {                                                                                                                  \
        "questions", 'q', CLI_COUNT, &(l).wanted.max_questions, "N", "use only the first N questions of every context" \
    }

// The names among the options, as given; NULL: not given.
typedef struct option_words {
    const char *aggregate, *scope, *hull, *order, *window, *loss, *gains;
    bool paper, alone, shrink; // shrink: was given
} option_words;

typedef struct solve_outputs {
    const char *table, *npy, *budgets; // file names, or patterns of them (report/output.h); NULL: not wanted
    const char *csv;                             // file name; NULL: not wanted
    bool json, quiet;
} solve_outputs;

typedef struct solve_line {
    const cli_command *self;
    // Which part of the record:
    cli_list metrics;
    selection_request wanted;
    // How to solve:
    option_words words;
    constraint_wishes wishes;
    study_options options;
    bool choose_window; // --window auto
    kvb_limits limits;  // that options.limits points to
    // What to write:
    solve_outputs outputs;
} solve_line;

// What holds before the command line is read; and the end of it.
solve_line solve_line_make(const cli_command *self);
void solve_line_free(solve_line *l);
// Checks what was given, and fills `wanted` and `options` but for what depends on the record. aggregate: how where it
// is not given. An exit code.
int solve_line_check(solve_line *l, const char *aggregate);

// The bar that study/ tells of its progress; stops it after a signal.
study_progress progress_on(progress *bar);
