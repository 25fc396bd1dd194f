// Tasks with known answers, made from a seed at any length: those of RULER (Hsieh et al., arXiv 2404.06654) that need
// no download, word for word as NVIDIA's generator writes them, key-value pairs, and questions about given texts. The
// context is compressed before any question is seen, as kvpress does it; scores are kvpress's.
//
// A task is written `name[:parameter=value...]`, e.g. `niah_multikey_1:keys=8`. Sample number i of a task depends only
// on (task, length, seed, i, tokenizer, haystack). Draws come from Philox, keyed by the task, seed and i, so words,
// numbers and places are not those that the generator's Python would draw.
#pragma once
#include "formats/calib.h"
#include "profiler/metric/spec.h"
#include "profiler/text/tokenizer.h"
#include <stdbool.h>
#include <stdio.h>

enum { TASK_SPEC_MAX = 96, TASK_MAX_GOLD = 16, TASK_MAX_QUESTIONS = 64 };

// The parameters of each task; task_kinds in task.c say what a field means.
typedef union task_settings {
    struct task_niah_settings {
        uint32_t keys, values, queries, questions;
    } niah;
    struct task_tracking_settings {
        uint32_t hops;
    } tracking;
    struct task_pairs_settings {
        uint32_t questions;
        bool uuid;
    } pairs;
    struct task_qa_settings {
        uint32_t questions;
    } qa;
} task_settings;

// How an answer is scored, in [0, 1].
typedef enum task_rule {
    TASK_ALL, // the share of the gold strings that the answer contains (string_match_all)
    TASK_F1,  // SQuAD's F1 between the answer's first line and the best gold string
} task_rule;

typedef struct task_question {
    char *text;                // "What is the special magic number for sharp-apple mentioned in the provided text? "
    char *prefix;              // how its answer begins, after a chat's user turn; "": the model begins it
    char *gold[TASK_MAX_GOLD]; // n_gold strings
    size_t n_gold;
} task_question;

typedef struct task_sample {
    char id[65]; // [A-Za-z0-9_.-], unique within a task, length and seed
    char *context;
    size_t n_tokens; // of the context, without BOS
    size_t length;   // with the longest question and its answer: what RULER calls max_seq_length
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

// Where needles are hidden: between lines of noise, between sentences of a text, among other needles.
typedef enum task_hay { HAY_NOISE, HAY_ESSAY, HAY_NEEDLES } task_hay;

struct task_kind {
    spec_row spec; // name and parameters, whose values are in task.set
    const char *summary;
    task_rule rule;
    uint32_t new_tokens; // the most tokens of an answer, as in RULER
    bool whole_text;     // made from task_source.texts instead of a length
    task_hay hay;        // where needles are hidden; the next two say whether their keys and values are UUIDs
    bool uuid_keys, uuid_values;
    kvb_status (*build)(task_draft *d, kvb_error *err);
};

// Inputs that all samples of a run share.
typedef struct task_source {
    const tokenizer *tokens; // counts the length
    uint64_t seed;
    const char *haystack;    // UTF-8 text for the tasks of HAY_ESSAY, repeated if it is too short; NULL: none
    const calib_file *texts; // for `qa` alone: contexts with questions and answers; else NULL
} task_source;

extern const task_kind task_kinds[];
extern const size_t task_kind_count;

// Parses `name[:parameter=value...]`; on KVB_ARGUMENT the message lists the known tasks.
kvb_status task_parse(task *out, const char *text, kvb_error *err);

// Makes sample number `index`, as long as fits into n_tokens tokens with its question and answer (for `qa`, n_tokens
// counts the context alone; 0: the whole text). Fails with KVB_ARGUMENT if n_tokens is too short for the task or a
// source is missing. On failure *out is zero.
kvb_status task_make(task_sample *out, const task *t, const task_source *source, size_t n_tokens, uint64_t index,
                     kvb_error *err);
void task_sample_free(task_sample *sample); // leaves it zero

// Returns the score of one answer, 0 to 1. The case of ASCII letters is ignored. TASK_ALL looks for the gold strings as
// they are, in the answer without its control characters.
double task_score(task_rule rule, const char *answer, char *const *gold, size_t n_gold);
// Whether the rest of the answer cannot change the score: everything is found, or the line that counts is complete.
bool task_score_is_final(task_rule rule, const char *answer, char *const *gold, size_t n_gold);

// Writes a sample as one line of calibration data (formats/README.md): answers joined by ", ", so that a task can be
// profiled too, and in addition "gold" (list per question), "task", "seed" and "n_tokens".
kvb_status task_write_jsonl(FILE *to, const task *t, const task_sample *sample, uint64_t seed, kvb_error *err);
