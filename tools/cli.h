// What every subcommand shares: option tables with help text, number parsing, progress. No algorithm lives in tools/.
#pragma once
#include "runtime/kvbudget.h"
#include "tools/named_files.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

// What kind of value an option takes, and what cli_option.value points to.
typedef enum cli_kind {
    CLI_FLAG,     // bool; the option takes no value
    CLI_TEXT,     // const char *, which then points into argv
    CLI_CHOICE,   // the same; one of the words of the metavar (a|b|c)
    CLI_COUNT,    // uint64_t, at most UINT32_MAX: what the library counts in
    CLI_POSITIVE, // the same, at least 1
    CLI_SEED,     // any uint64_t
    CLI_REAL,     // double
    CLI_LIST,     // cli_list; the option may be repeated
    CLI_INPUT,    // as CLI_TEXT: a file to read, perhaps behind a '='
    CLI_INPUTS,   // as CLI_LIST: such files
    CLI_OUTPUT    // as CLI_TEXT: a file to write; use CLI_WRITES
} cli_kind;
// CLI_OUTPUT with the kind of file (named_files.h).
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

// The options of every command that prints numbers: the same rows as JSON and CSV.
#define RESULTS_OPTIONS(o)                                                                                  \
    {"json", 0, CLI_FLAG, &(o).json, NULL, "print all rows as JSON instead of the table (docs/output.md)"}, \
    {                                                                                                       \
        "csv", 0, CLI_WRITES(FILE_CSV), &(o).csv, "FILE", "also write all rows as CSV"                      \
    }

// Parses argv with getopt_long and stores the values. `options` ends with a {0} entry; --help is added to them, and
// --force if any option is an output. Registers operands and options that are files (named_files.h). Returns
//   EXIT_DONE    success: the operands are argv[*first .. argc-1]
//   -1           --help was given and the command's manual printed; the caller returns EXIT_DONE
//   EXIT_USAGE   an option is wrong; what is wrong and where to look was printed
//   EXIT_FAILED  an output may not be written; why was printed
int cli_parse(const cli_command *command, const cli_option *options, int argc, char **argv, int *first);
// The same for commands whose first operand is a file of this kind to write.
int cli_parse_output(const cli_command *command, const cli_option *options, file_kind written, int argc, char **argv,
                     int *first);
void cli_print_manual(const cli_command *command, const cli_option *options);
void cli_list_free(cli_list *list);
// Parses a share to prune, 0.8 or 80%: at least 0 and below 1. Returns false for anything else.
bool cli_ratio(double *out, const char *text);
// Checks --sink and --window, which are UINT64_MAX if not given: their sum must fit a count. Returns EXIT_DONE or,
// after a message, EXIT_USAGE.
int cli_check_protected(const cli_command *command, uint64_t sink, uint64_t window);

// Reads a file into *out, which the caller frees, with a NUL behind its *size bytes (size NULL: not asked for), and
// checks that it is UTF-8 text without NUL. Errors: those of file_map() and KVB_FORMAT.
kvb_status cli_read_text(char **out, size_t *size, const char *path, kvb_error *err);

// Finds a folder that comes with the program: the one that the environment variable names; if that is not set, NAME
// beside the program's own folder (source tree, wheel), or else share/kvbudget/NAME beside it (installed). The caller
// frees *out. Fails with KVB_IO, and a message that says where a folder of `what` was looked for; *out is then NULL.
kvb_status cli_program_folder(char **out, const char *variable, const char *name, const char *what, kvb_error *err);
// Makes a folder unless there is something of that name. Fails with KVB_IO.
kvb_status cli_make_folder(const char *path, kvb_error *err);

// Print `kvbudget help metrics`; with --json, for each metric that can be used alone: default and choices ("a|b") of
// its parameters, which of these are real numbers, kvpress's class with the parameters that become its arguments ("":
// none), protected tokens (the parameter `window` if window_protected), and the row's constant.
void print_metrics_help(void);
void print_metrics_json(void);

// Prints "kvbudget NAME: message" to stderr and returns EXIT_USAGE / EXIT_FAILED.
int cli_usage_error(const cli_command *command, const char *format, ...) __attribute__((format(printf, 2, 3)));
int cli_failed(const cli_command *command, const kvb_error *err);

// Progress of long work on stderr: on a terminal a bar that is redrawn, with rate and time left; in a log a plain line
// every few seconds.
typedef struct progress {
    const char *label;
    double start, last_shown; // seconds, CLOCK_MONOTONIC
    double first_done;        // what was done at the first update: resumed work must not count towards the rate
    double left;              // seconds, as last shown
    bool terminal, quiet;
} progress;

void progress_begin(progress *p, const char *label, bool quiet);
// Draws at most a few times a second. `unit` is what `done` and `total` count; NULL: show only the share.
void progress_update(progress *p, double done, double total, const char *unit);
void progress_end(progress *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
void progress_clear(progress *p); // removes the bar from a terminal without a last line
// For weights_watch.hashed; `bar` is a progress. Counts gigabytes; returns false after a signal to stop.
bool progress_hashed(void *bar, double done, double total);
double seconds_now(void); // CLOCK_MONOTONIC

// From now on SIGINT, SIGTERM and SIGHUP remove temporary files and end the program; those that were ignored at the
// start stay ignored. SIGXFSZ is ignored, so that growing beyond `ulimit -f` is a write error. Call before anything
// starts a thread (a parallel region, MPI), because threads inherit the signal mask.
void cli_watch_signals(void);
// From now on the first of these signals only stores its number in cli_stop_requested, which long work polls in order
// to stop with KVB_INTERRUPTED; a second signal ends the program.
extern atomic_int cli_stop_requested;
void cli_catch_signals(void);
// Call when everything is cleaned up. After such a signal, ends the program by that signal, so that a shell's loop ends
// too; without one, does nothing.
void cli_end_by_signal(void);

// Returns the number of columns of the terminal that fd is, or `otherwise` if it is not a terminal.
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
    row(export) \
    row(import) \
    row(inspect) \
    row(task)
// clang-format on
#define DECLARE_COMMAND(name) extern const cli_command cmd_##name;
ALL_COMMANDS(DECLARE_COMMAND)
