// Calibration data: JSON lines, one context with its questions per line. formats/README.md lists the keys.
#pragma once
#include "formats/names.h"
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define CALIB_MAX_LINE ((size_t)64 << 20) // bytes

// Text is UTF-8 (bytes that are not are passed on unchanged), token ids are integers >= 0. Of each pair of fields
// (text, ids) exactly one is set; of (answer, answer_ids) at most one, the same one for all questions of a line that
// have an answer (null stands for those that have none).
typedef struct calib_question {
    char *text;
    int32_t *ids; // tokens of the question, without the answer prefix
    size_t n_ids;
    char *answer; // given answer: decoding is teacher-forced on it
    int32_t *answer_ids;
    size_t n_answer_ids;
} calib_question;

typedef struct calib_context {
    char *sample_id; // unique in the file, [A-Za-z0-9_.-]{1,64}; default: name of the file without folder and suffix,
                     // '-', line number
    char *context;
    int32_t *context_ids;
    size_t n_context_ids;
    calib_question *questions;
    size_t n_questions;     // >= 1
    char *answer_prefix;    // follows a question that is text; default "\nAnswer:"
    bool has_answer_prefix; // whether the line gives it
    size_t line;            // 1-based, for messages
} calib_context;

typedef struct calib_file {
    calib_context *contexts;
    size_t count;    // >= 1
    char sha256[65]; // of the whole file
    char *name;      // as it was given, for messages
} calib_file;

// Parses a file, or bytes in memory (`name` is used in messages and for default ids). Unknown keys are ignored, blank
// lines skipped. Every error names file and line: KVB_FORMAT (not JSON, a key of the wrong type, duplicates, NUL in a
// text, line too long), KVB_IO. On failure *out is zero.
kvb_status calib_load(calib_file *out, const char *path, kvb_error *err);
kvb_status calib_parse(calib_file *out, const void *data, size_t size, const char *name, kvb_error *err);
// Writes one context as a line, with the keys that the reader takes; answers are left out if no question has one. The
// content is not checked, and write errors of `to` show up when it is closed (atomic_file_commit).
void calib_write_line(FILE *to, const calib_context *context);
// Makes the sample_id of line `number` of a file that gives none: "texts/my story.jsonl", 3 -> "my_story-3"; 0 ->
// "my_story", for a file that is one context.
void calib_default_id(char out[CONTEXT_ID_MAX + 1], const char *path, size_t number);
// Whether a tokenizer is needed: some context, question or given answer is text.
bool calib_has_text(const calib_file *file);
void calib_free(calib_file *file); // leaves it zero
