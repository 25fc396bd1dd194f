// What every subcommand shares: option tables with help text, number parsing, progress. No algorithm lives in tools/.
#pragma once
#include "runtime/kvbudget.h"
#include "tools/named_files.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

// One option of a subcommand. `value` receives what the user gave, by kind:
// FLAG bool*, TEXT const char** (points into argv), COUNT uint64_t*, POSITIVE the same without 0, REAL double*, LIST
// cli_list* (the option may be repeated), CHOICE const char**, one of the words of its metavar (a|b|c). INPUT and
// INPUTS are TEXT and LIST that name files to read, or hold one behind a '='; CLI_WRITES(kind) is TEXT that names a
// file to write.
typedef enum cli_kind {
    CLI_FLAG,
    CLI_TEXT,
    CLI_CHOICE,
    CLI_COUNT,
    CLI_POSITIVE,
    CLI_REAL,
    CLI_LIST,
    CLI_INPUT,
    CLI_INPUTS,
    CLI_OUTPUT
} cli_kind;
#define CLI_WRITES(file_kind) (CLI_OUTPUT + (file_kind))

typedef struct cli_list {
    const char **items; // point into argv; the array belongs to the list (cli_list_free)
    size_t count;
} cli_list;

typedef struct cli_option {
    const char *name; // long name without dashes
    char short_name;  // 0 when there is none
    cli_kind kind;
    void *value;
    const char *metavar; // what the help calls the value: FILE, N, RATIO; NULL for flags
    const char *help;    // one sentence; '\n' starts another line
} cli_option;

typedef struct cli_command {
    const char *name;
    const char *synopsis; // after "kvbudget ": profile MODEL CALIB... -o RUN.h5
    const char *summary;  // one line for the list of commands
    const char *details;  // paragraphs and examples for `kvbudget help NAME`
    // argv[0] is the command's name; returns an exit code.
    int (*run)(const struct cli_command *self, int argc, char **argv);
} cli_command;

// Of every command that prints numbers: JSON and CSV of the same rows.
#define RESULTS_OPTIONS(o)                                                                                  \
    {"json", 0, CLI_FLAG, &(o).json, NULL, "print all rows as JSON instead of the table (docs/output.md)"}, \
    {                                                                                                       \
        "csv", 0, CLI_WRITES(FILE_CSV), &(o).csv, "FILE", "also write all rows as CSV"                      \
    }

// Parses argv with getopt_long. `options` ends with a {0} entry. On success returns EXIT_DONE and the operands are
// argv[*first .. argc-1]; --help prints the manual of the command and returns -1 (the caller returns EXIT_DONE);
// a wrong option prints what is wrong and where to look and returns EXIT_USAGE. Operands and options that are files are
// told to named_files.h; EXIT_FAILED after a message where an output may not be written. A command with outputs has
// --force, whether its options say so or not.
int cli_parse(const cli_command *command, const cli_option *options, int argc, char **argv, int *first);
// The same where the first operand is a file of this kind to write.
int cli_parse_output(const cli_command *command, const cli_option *options, file_kind written, int argc, char **argv,
                     int *first);
void cli_print_manual(const cli_command *command, const cli_option *options);
void cli_list_free(cli_list *list);
// A share to prune, 0.8 or 80%: at least 0, below 1. False for anything else.
bool cli_ratio(double *out, const char *text);

// A folder that comes with the program: the one that the environment variable names; where it is not set, NAME beside
// the program's own folder (source tree, wheel), or share/kvbudget/NAME there (installed). *out is malloc'd, NULL on
// failure: KVB_IO, which says where no folder of `what` was.
kvb_status cli_program_folder(char **out, const char *variable, const char *name, const char *what, kvb_error *err);

// `kvbudget help metrics`; with --json, of each metric that stands by itself: default and choices of its parameters
// ("a|b"), which of these are real numbers, kvpress's class with the parameters that its arguments are ("": none),
// protected tokens (the parameter `window` where window_protected), and the row's constant.
void print_metrics_help(void);
void print_metrics_json(void);

// Prints "kvbudget NAME: message" to stderr and returns EXIT_USAGE / EXIT_FAILED.
int cli_usage_error(const cli_command *command, const char *format, ...) __attribute__((format(printf, 2, 3)));
int cli_failed(const cli_command *command, const kvb_error *err);

// Progress of long work: a redrawn bar with rate and time left on a terminal, a plain line every few seconds in a log.
typedef struct progress {
    const char *label;
    double start, last_shown; // seconds, CLOCK_MONOTONIC
    double first_done;        // what was done at the first update: resumed work must not count towards the rate
    double left;              // seconds, as last told
    bool terminal, quiet;
} progress;

void progress_begin(progress *p, const char *label, bool quiet);
// Draws at most a few times a second. unit: what is counted; NULL: nothing that could be counted, only a share.
void progress_update(progress *p, double done, double total, const char *unit);
void progress_end(progress *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
void progress_clear(progress *p); // takes away what a terminal shows of it; nothing is said of its end
// weights_watch.hashed of a bar: gigabytes; false once somebody wants to stop.
bool progress_hashed(void *bar, double done, double total);
double seconds_now(void); // CLOCK_MONOTONIC

// SIGINT, SIGTERM and SIGHUP end the program, and its temporary files with it; those that were ignored when it started
// stay ignored. A file that grows beyond `ulimit -f` is an error of writing. Called before anything starts a thread (a
// parallel region, MPI), since threads take over what is blocked.
void cli_watch_signals(void);
// From here on the first of them only leaves its number here, and a second one kills; long work polls it and stops
// cleanly with KVB_INTERRUPTED.
extern atomic_int cli_stop_requested;
void cli_catch_signals(void);
// After such a signal, when all is cleaned up: ends by it, so that a shell's loop ends too. Else does nothing.
void cli_end_by_signal(void);

// Columns of the terminal behind fd, or `otherwise` when it is none.
int cli_terminal_width(int fd, int otherwise);

// All commands, in the order of the help: row(NAME) is what cmd/NAME.c defines as `const cli_command cmd_NAME`.
// clang-format off
#define ALL_COMMANDS(row) \
    row(tune) \
    row(tables) \
    row(calib) \
    row(profile) \
    row(merge) \
    row(learn) \
    row(solve) \
    row(validate) \
    row(eval) \
    row(refine) \
    row(recommend) \
    row(report) \
    row(budgets) \
    row(plot) \
    row(export) \
    row(import) \
    row(inspect) \
    row(tokenize) \
    row(logits) \
    row(task)
// clang-format on
#define DECLARE_COMMAND(name) extern const cli_command cmd_##name;
ALL_COMMANDS(DECLARE_COMMAND)
