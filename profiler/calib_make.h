// Makes calibration lines from plain texts: questions that the text itself answers.
//
//   its own        questions that the calibration data already has
//   lines          "The line of the text above that begins with "..." is: ..." and the rest of that line
//   continuation   no question: the text's own next tokens are decoded
//
// Contexts, questions and answers are tokens, so that a continuation begins exactly where its context ends.
#pragma once
#include "formats/calib.h"
#include "profiler/text/tokenizer.h"

typedef struct calib_recipe {
    uint64_t n_tokens;   // the most tokens of a context, including the model's BOS token; >= 16
    uint64_t n_contexts; // contexts cut from a plain text, one after the other; 0: as many as it has tokens for
    uint64_t n_own;      // the most questions to take of those that a context already has
    bool ignore_answers; // leave out their answers, so that a profile samples them
    uint64_t n_lines;    // questions of each kind for every context
    uint64_t n_continued;
    uint64_t n_answer; // tokens of a continuation, and the most of a line's rest; >= 2
    uint64_t seed;     // for drawing lines, together with the sample_id
} calib_recipe;

enum { CALIB_LEAST_CONTEXT = 16, CALIB_MOST_MADE = 1 << 16 };

// Both add contexts to *out, in the order of the text. After a failure *out may only be passed to calib_free. `name` is
// the file, for messages and for the sample_id of a plain text. Contexts of a plain text never share tokens, not even
// with the previous one's continuation. Errors: KVB_FORMAT (a plain text that is not UTF-8 or holds NUL), KVB_ARGUMENT
// (not enough tokens, too few lines to ask for, a sample_id that *out has already, ids that the tokenizer does not
// know), KVB_MEMORY.
kvb_status calib_make_of_text(calib_file *out, const calib_recipe *recipe, const tokenizer *t, const char *name,
                              const char *text, size_t size, kvb_error *err);
kvb_status calib_make_of_context(calib_file *out, const calib_recipe *recipe, const tokenizer *t, const char *name,
                                 const calib_context *context, kvb_error *err);
