// The command line that `eval`, `refine` and `recommend` share, in three parts, and what is opened from it.
#pragma once
#include "evaluator/sweep.h"
#include "tools/cmd/methods.h"
#include "tools/cmd/opened_model.h"

// Which model runs on which texts.
typedef struct eval_inputs {
    const char *backend_name, *compute, *bos, *pre;
    bool chat, special;
    uint64_t n_tokens, n_next; // context and continuation of every text
    // Filled when opened:
    const backend *device;
    opened_model opened;
    const model *m; // that of `opened`
    sweep_text *texts;
    size_t n_texts;
    size_t *origin; // [n_texts] the operand that each text came from; the model is operand 0
    size_t reading; // while texts are read: the current operand
} eval_inputs;

// The defaults of these inputs, and entries for a command's list of options.
// clang-format off
#define EVAL_INPUTS {.backend_name = "cpu", .compute = "f32", .bos = "auto", .n_tokens = 2048, .n_next = 64}
#define EVAL_INPUT_OPTIONS(in) \
    {"tokens", 't', CLI_COUNT, &(in).n_tokens, "N", "context: the first N tokens of every text (2048)"}, \
    {"next", 'n', CLI_COUNT, &(in).n_next, "N", "tokens that follow, teacher-forced (64)"}, \
    {"chat", 0, CLI_FLAG, &(in).chat, NULL, \
     "wrap texts in the model's chat template (default: as the tables were calibrated)"}, \
    {"special", 0, CLI_FLAG, &(in).special, NULL, \
     "find control tokens in texts (default: as the tables were calibrated)"}, \
    {"bos", 0, CLI_CHOICE, &(in).bos, "auto|yes|no", "begin texts with BOS; auto: as the model file says"}, \
    {"backend", 'b', CLI_TEXT, &(in).backend_name, "NAME", "cpu or ref"}, \
    {"compute", 0, CLI_TEXT, &(in).compute, "KIND", DEVICE_COMPUTE_HELP}
// clang-format on

typedef struct eval_outputs {
    const char *name, *kept, *csv; // NULL: not wanted
    bool quiet, json;
} eval_outputs;

typedef struct eval_command {
    const cli_command *self;
    eval_inputs in;
    // What is compared, and how:
    methods with;
    uint64_t batch, threads, seed; // seed: for commands that draw
    eval_outputs out;
} eval_command;

// Each of the following returns EXIT_DONE; EXIT_USAGE, after a message, if the command line is wrong; or EXIT_FAILED,
// after a message, if a file is.

// Checks --tokens and --next.
int eval_check_lengths(const eval_command *e);
// Opens model, methods, ratios and texts from n operands (the model first) and the options.
int eval_open_inputs(eval_command *e, char **operands, size_t n);
// Checks the number of operands of a command that is about one table, such as refine: a model, a table and texts.
int eval_check_operands(const cli_command *self, int n);
// For such a command: catches signals, sets the threads and opens everything; e->with then has one column. `ratios` is
// the default of --ratio.
int eval_open_table(eval_command *e, char **operands, size_t n, const char *ratios);
void eval_free_inputs(eval_command *e);
