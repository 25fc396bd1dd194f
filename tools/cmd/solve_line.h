// The command line of solve and validate, in three parts: which part of the record, how to solve (with what is demanded
// of budgets beyond their sum), what to write.
#pragma once
#include "study/layer_map.h"
#include "study/options.h"
#include "study/progress.h"
#include "study/selection.h"
#include "tools/cli.h"

// Options of both commands, for their tables: which part of the record, and what is protected.
// clang-format off
#define SELECTION_OPTIONS(l) \
    {"sink", 0, CLI_COUNT, &(l).options.sink, "N", \
     "first tokens that are always kept (default: as recorded with the metric)"}, \
    {"window", 0, CLI_COUNT, &(l).options.window, "N", \
     "last tokens that are always kept (default: as recorded with the metric)"}, \
    {"contexts", 'c', CLI_TEXT, &(l).wanted.contexts, "IDS", "use only these contexts, commas between"}, \
    {"questions", 'q', CLI_COUNT, &(l).wanted.max_questions, "N", "use only the first N questions of every context"}
// clang-format on

// As given on the command line; counts are 0 and texts NULL when not given.
typedef struct constraint_wishes {
    uint64_t block, levels, ranks, tokens;
    cli_list caps, floors, ceilings, pins;
    const char *ratios, *bytes, *dtype;
} constraint_wishes;

// Entries of a table of options. Help texts of one line each; details are in `kvbudget help solve`.
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

// The names among the options, as given; NULL: not given.
typedef struct option_words {
    const char *aggregate, *scope, *hull, *order, *loss;
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

// What holds before the command line is read; and the end of it.
solve_line solve_line_make(const cli_command *self);
void solve_line_free(solve_line *l);
// Checks what was given, and fills `wanted` and `options` but for what depends on the record. aggregate: how where it
// is not given. An exit code.
int solve_line_check(solve_line *l, const char *aggregate);

// Opens the record and what the options mean for it; tells where a table for every per cent ends before 99 %. The
// caller closes the selection, also after a failure.
kvb_status solve_line_open(solve_line *l, selection *from, const char *path, kvb_error *err);

// Options that do not go together, and what is said of it.
typedef struct refusal {
    bool when;
    const char *why;
} refusal;
// Says why of the first one that holds. An exit code.
int refuse_first(const cli_command *self, const refusal *all, size_t n);

// The bar that study/ tells of its progress; stops it after a signal.
study_progress progress_on(progress *bar);

// Whether anything but ratios was given.
bool wishes_limit(const constraint_wishes *w);
// Whether ratios were chosen, in whichever way: the table then need not have a row for every per cent.
bool wishes_ratios(const constraint_wishes *w);

// What the wishes mean for a record and the layers that it has of its model: fills ratios, n_rows, own_ratios and,
// where anything but ratios is wished for, limits of the options, which then point to *limits (to be freed by the
// caller, also after a failure). o->scope is set. Errors: KVB_ARGUMENT, naming the option.
kvb_status wishes_apply(const constraint_wishes *w, const record_shape *shape, const layer_map *layers,
                        study_options *o, kvb_limits *limits, kvb_error *err);
