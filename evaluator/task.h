// Tasks with known answers, generated from a seed at any length, modelled on RULER (Hsieh et al., arXiv 2404.06654) and
// scored like it: a context that is compressed before any question is seen, questions, and the strings that a right
// answer contains.
//
// A task is written `name[:parameter=value...]`, e.g. `niah_multikey:keys=8`. The sample number i of a task depends on
// (task, length, seed, i, tokenizer, haystack) alone: draws come from Philox keyed by them.
#pragma once
#include "formats/calib.h"
#include "profiler/metric/spec.h"
#include "profiler/text/tokenizer.h"
#include <stdbool.h>
#include <stdio.h>

enum { TASK_SPEC_MAX = 96, TASK_MAX_GOLD = 16, TASK_MAX_QUESTIONS = 64 };

// The parameters of each task; the tasks' own files say what a field means.
typedef union task_settings {
    struct task_niah_settings {
        uint32_t digits;
        bool uuid;
        uint32_t keys, questions, values, queries;
    } niah;
    struct task_tracing_settings {
        uint32_t chains, hops;
        bool example;
    } tracing;
    struct task_common_settings {
        uint32_t common, often, rarely;
    } common;
    struct task_frequent_settings {
        uint32_t zipf;
    } frequent;
    struct task_pairs_settings {
        uint32_t questions;
        bool uuid;
    } pairs;
    struct task_qa_settings {
        uint32_t questions;
    } qa;
} task_settings;

// How an answer is scored, in [0, 1]. RULER's names are string_match_all and string_match_part.
typedef enum task_rule {
    TASK_ALL, // the share of the gold strings that the answer contains
    TASK_ANY, // 1 if it contains one of them
    TASK_F1,  // SQuAD's F1 between the answer's first line and the best gold string
} task_rule;

typedef struct task_question {
    char *text;                // everything up to the answer, e.g. "... The special magic number for apple is:"
    char *gold[TASK_MAX_GOLD]; // n_gold strings
    size_t n_gold;
} task_question;

typedef struct task_sample {
    char id[65]; // [A-Za-z0-9_.-], unique within a task, length and seed
    char *context;
    size_t n_tokens; // of the context, without BOS
    task_question questions[TASK_MAX_QUESTIONS];
    size_t n_questions;
} task_sample;

typedef struct task_kind task_kind;
typedef struct task_draft task_draft;

// A task with its parameters set.
typedef struct task {
    const task_kind *kind;
    char spec[TASK_SPEC_MAX]; // canonical text: the name and the parameters that differ from their defaults
    task_settings set;
} task;

struct task_kind {
    spec_row spec; // name and parameters, whose values are in task.set
    const char *summary;
    task_rule rule;
    uint32_t new_tokens; // enough for a right answer, as RULER allows
    bool whole_text;     // made from task_source.texts instead of a length
    kvb_status (*build)(task_draft *d, kvb_error *err);
};

// Inputs that all samples of a run share.
typedef struct task_source {
    const tokenizer *tokens; // counts the length
    uint64_t seed;
    const char *haystack;    // UTF-8 text whose sentences are the haystack; NULL: RULER's noise sentences
    const calib_file *texts; // for `qa` alone: contexts with questions and answers; else NULL
} task_source;

extern const task_kind *const task_kinds[];
extern const size_t task_kind_count;

// Parses `name[:parameter=value...]`; on KVB_ARGUMENT the message lists the known tasks.
kvb_status task_parse(task *out, const char *text, kvb_error *err);

// Makes sample number `index`, the longest that fits into n_tokens tokens of context (0, only for `qa`: the whole
// text). Fails with KVB_ARGUMENT if n_tokens is too short for the task or a source is missing. On failure *out is zero.
kvb_status task_make(task_sample *out, const task *t, const task_source *source, size_t n_tokens, uint64_t index,
                     kvb_error *err);
void task_sample_free(task_sample *sample); // leaves it zero

// Scores one answer, ignoring case (ASCII). A final full stop and surrounding blanks of gold strings are ignored.
double task_score(task_rule rule, const char *answer, char *const *gold, size_t n_gold);
// Whether the score is final, whatever the rest of the answer is: everything is found, or the line that counts is
// complete.
bool task_score_is_final(task_rule rule, const char *answer, char *const *gold, size_t n_gold);

// Writes a sample as one line of calibration data (formats/README.md): answers joined by ", ", so that a task can be
// profiled too, and in addition "gold" (list per question), "task", "seed" and "n_tokens".
kvb_status task_write_jsonl(FILE *to, const task *t, const task_sample *sample, uint64_t seed, kvb_error *err);
