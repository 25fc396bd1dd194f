// The command line of solve and validate in three parts: which part of the record to use, how to solve (including
// constraints on the budgets), and what to write.
#pragma once
#include "study/layer_map.h"
#include "study/options.h"
#include "study/progress.h"
#include "study/selection.h"
#include "tools/cli.h"

// Options of both commands: which part of the record to use, and how many tokens are protected.
// clang-format off
#define SELECTION_OPTIONS(l) \
    {"sink", 0, CLI_COUNT, &(l).options.sink, "N", \
     "first tokens that are always kept (default: as recorded with the metric)"}, \
    {"window", 0, CLI_COUNT, &(l).options.window, "N", \
     "last tokens that are always kept (default: as recorded with the metric)"}, \
    {"contexts", 'c', CLI_TEXT, &(l).wanted.contexts, "IDS", "use only these contexts, commas between"}, \
    {"questions", 'q', CLI_COUNT, &(l).wanted.max_questions, "N", "use only the first N questions of every context"}
// clang-format on

// Constraints as the command line gives them: what was not given is 0 or NULL.
typedef struct constraint_wishes {
    uint64_t block, levels, ranks, tokens;
    cli_list caps, floors, ceilings, pins;
    const char *ratios, *bytes, *dtype;
} constraint_wishes;

// The options for them.
// clang-format off
#define CONSTRAINT_OPTIONS(w) \
    {"ratios", 0, CLI_TEXT, &(w).ratios, "LIST", \
     "solve for these prune ratios only: 0.3,0.5,0.8, or FIRST:LAST:STEP such as\n0.5:0.9:0.05"}, \
    {"bytes", 0, CLI_TEXT, &(w).bytes, "SIZE", \
     "solve for a cache of at most SIZE, e.g. 2GiB or 900MB, with --dtype and --tokens"}, \
    {"dtype", 0, CLI_TEXT, &(w).dtype, "TYPE", \
     "with --bytes: what the cache holds: f32, f16, bf16, fp8, q8_0, q4_0 (f16)"}, \
    {"tokens", 0, CLI_POSITIVE, &(w).tokens, "T", "with --bytes: length of the context"}, \
    {"block", 0, CLI_COUNT, &(w).block, "N", "make budgets whole pages of N tokens"}, \
    {"levels", 0, CLI_COUNT, &(w).levels, "K", "at most K different budgets within a layer"}, \
    {"ranks", 0, CLI_COUNT, &(w).ranks, "P", \
     "equal totals for P tensor-parallel ranks, which divide every layer's heads"}, \
    {"layer-cap", 0, CLI_LIST, &(w).caps, "SHARE[@LAYER]", \
     "a layer keeps at most this share of its tokens; repeatable"}, \
    {"floor", 0, CLI_LIST, &(w).floors, "SHARE[@LAYER[.HEAD]]", \
     "heads keep at least this share of their tokens; repeatable"}, \
    {"ceiling", 0, CLI_LIST, &(w).ceilings, "SHARE[@LAYER[.HEAD]]", "heads keep at most this share; repeatable"}, \
    {"pin", 0, CLI_LIST, &(w).pins, "LAYER[.HEAD]", "these heads keep everything; repeatable"}
// clang-format on

// Options that are words, as given; NULL: not given.
typedef struct option_words {
    const char *aggregate, *scope, *hull, *order, *loss, *formats;
    bool paper, alone, shrink; // shrink: was given
} option_words;

typedef struct solve_outputs {
    const char *table, *budgets; // file names, or patterns of them (report/output.h); NULL: not wanted
    const char *csv;             // file name; NULL: not wanted
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
    kvb_limits limits; // that options.limits points to
    // What to write:
    solve_outputs outputs;
} solve_line;

// Returns the defaults, before the command line is parsed. The caller frees with solve_line_free().
solve_line solve_line_make(const cli_command *self);
void solve_line_free(solve_line *l);
// Checks what was given, and fills `wanted` and `options`, except what depends on the record. `aggregate`: the default
// of --aggregate. Returns an exit code; if it is not EXIT_DONE, a message was printed.
int solve_line_check(solve_line *l, const char *aggregate);

// Opens the record, and completes `options` with what depends on it. Warns if constraints end a table for every per
// cent before 99 %. The caller closes the selection, also after a failure.
kvb_status solve_line_open(solve_line *l, selection *from, const char *path, kvb_error *err);

// A reason to refuse a command line, such as two options that exclude each other.
typedef struct refusal {
    bool when;
    const char *why;
} refusal;
// Prints `why` of the first one whose `when` is true and returns EXIT_USAGE; returns EXIT_DONE if there is none.
int refuse_first(const cli_command *self, const refusal *all, size_t n);

// Makes a study_progress that draws `bar`, and asks the study to stop after a signal.
study_progress progress_on(progress *bar);

// Tells whether a constraint other than ratios was given.
bool wishes_limit(const constraint_wishes *w);
// Tells whether ratios were chosen (--ratios or --bytes), so that the table need not have a row for every per cent.
bool wishes_ratios(const constraint_wishes *w);

// Applies the constraints to a record's shape and layers: fills the options' ratios, n_rows and own_ratios and, if a
// constraint other than ratios was given, `limits`, which then points to *limits. o->scope must be set. The caller
// frees *limits, also after a failure. Fails with KVB_ARGUMENT, naming the option.
kvb_status wishes_apply(const constraint_wishes *w, const record_shape *shape, const layer_map *layers,
                        study_options *o, kvb_limits *limits, kvb_error *err);
