// The command line of `kvbudget eval` in three parts, and what was opened from it.
#pragma once
#include "evaluator/sweep.h"
#include "tools/cmd/methods.h"
#include "tools/cmd/opened_model.h"

// Who runs on which texts.
typedef struct eval_inputs {
    const char *backend_name, *compute, *bos, *pre;
    bool chat, special;
    uint64_t n_tokens, n_next; // context and continuation of every text
    // Opened:
    const backend *device;
    opened_model opened;
    const model *m; // of it
    sweep_text *texts;
    size_t n_texts;
    size_t *origin; // [n_texts] which operand each came from, the model being 0
    size_t reading; // that operand, while texts are read
} eval_inputs;

// What all commands begin with; and the options of those that are about one table, as entries of a list.
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
    uint64_t batch, threads, seed; // seed: of who draws texts
    eval_outputs out;
} eval_command;

// Whether --tokens and --next can be; EXIT_USAGE after a message where not.
int eval_check_lengths(const eval_command *e);
// From operands and options to methods, ratios and texts. What is wrong with the command line is printed, and
// EXIT_USAGE returned; what is wrong with a file, EXIT_FAILED.
int eval_open_inputs(eval_command *e, char **operands, size_t n);
// For commands that are about one table and nothing else, such as refine: whether there are operands enough.
int eval_check_operands(const cli_command *self, int n);
// Catches signals, takes the threads, and opens; e->with has one column. `ratios`: those without --ratio.
int eval_open_table(eval_command *e, char **operands, size_t n, const char *ratios);
void eval_free_inputs(eval_command *e);
