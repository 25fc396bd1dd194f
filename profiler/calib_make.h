// Calibration lines made from texts alone: questions that a text itself answers.
//
//   its own        those that the calibration data has already
//   lines          "The line of the text above that begins with "..." is: ..." and the rest of that line
//   continuation   nothing is asked: the text's own next tokens are what is decoded
//   repetition     the text is to be repeated, and is, a piece for each question (the oracle of KVzip,
//                  arXiv 2505.23416, which repeats all of it)
//
// Contexts, questions and answers are tokens, so that a continuation begins exactly where its context ends.
#pragma once
#include "formats/calib.h"
#include "profiler/text/tokenizer.h"

typedef struct calib_recipe {
    uint64_t n_tokens;   // most of a context, the BOS token of the model included; >= 16
    uint64_t n_contexts; // of a plain text, one behind the other; 0: as many as it has tokens for
    uint64_t n_own;      // most of the questions that a context has already
    bool ignore_answers; // leave out the answers that these have, so that a profile samples them
    uint64_t n_lines;    // questions of each kind for every context
    uint64_t n_continued;
    uint64_t n_repeated;
    uint64_t n_answer; // tokens of a continuation or repetition, most of a line's rest; >= 2
    uint64_t seed;     // of the lines that are drawn, with the sample_id
} calib_recipe;

enum { CALIB_LEAST_CONTEXT = 16, CALIB_MOST_MADE = 1 << 16 };

// Each adds contexts to *out, in the order of the text; after a failure *out is good for calib_free only. `name` is the
// file, for messages and for the sample_id of a plain text. Contexts of a plain text never share tokens, not even with
// the continuation of one before. Errors: KVB_FORMAT (a plain text that is not UTF-8 or holds NUL), KVB_ARGUMENT (not
// enough tokens, too few lines to ask for, a sample_id that *out has already, ids that the tokenizer does not know),
// KVB_MEMORY.
kvb_status calib_make_of_text(calib_file *out, const calib_recipe *recipe, const tokenizer *t, const char *name,
                              const char *text, size_t size, kvb_error *err);
kvb_status calib_make_of_context(calib_file *out, const calib_recipe *recipe, const tokenizer *t, const char *name,
                                 const calib_context *context, kvb_error *err);
