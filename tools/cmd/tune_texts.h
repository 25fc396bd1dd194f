// The texts that a table is tuned on: those that come with the program and the user's own, each with one purpose.
#pragma once
#include "profiler/text/tokenizer.h"
#include <stdbool.h>

typedef enum tune_part {
    PART_CALIBRATE, // rankings and budgets are fitted to it
    PART_SELECT,    // chooses among candidates
    PART_JUDGE,     // only judges the result
    PART_COUNT
} tune_part;

typedef struct tune_text {
    char *path;
    tune_part part;
    bool own; // one of the user's
    size_t n_tokens;
    char sha256[65];
} tune_text;

typedef struct tune_texts {
    tune_text *items; // the user's first
    size_t count;
    size_t too_short; // texts that are left out because they have fewer tokens than a context and what follows it
} tune_texts;

// Opens the texts. The user's are dealt in turn: two to calibrate, one to select, one to judge. In the program's own
// folder (KVBUDGET_DATA, calib-data beside the program's folder, or share/kvbudget/calib-data) the place decides:
// calib-data/*.jsonl and most of plain/ calibrate, every third of plain/ selects, eval/ judges. Errors: KVB_IO (no
// such file, no such folder), KVB_FORMAT, KVB_ARGUMENT (a user's text that is too short, a text given twice).
kvb_status tune_texts_open(tune_texts *t, char *const *own, size_t n_own, const tokenizer *tokens, uint32_t n_tokens,
                           uint32_t n_next, kvb_error *err);
void tune_texts_close(tune_texts *t); // a zero struct is allowed

// Removes all texts of a purpose but the first `most`.
void tune_texts_limit(tune_texts *t, tune_part part, size_t most);
size_t tune_texts_count(const tune_texts *t, tune_part part);

// Returns how many contexts a text gives, each of `length` tokens with what follows it: up to four of a user's text
// that calibrates, one of any other.
size_t tune_text_contexts(const tune_text *t, size_t length);

// Writes calibration data (formats/calib.h) from the texts that calibrate, those numbered `first` to `last` - 1
// (tune_text_contexts). What follows a context, up to n_answer tokens, is the answer to one question; `n_lines` of its
// lines are asked for as well, if it has as many. Errors: those of reading and of atomic_file.h.
kvb_status tune_texts_write(const tune_texts *t, size_t first, size_t last, const tokenizer *tokens, uint32_t n_tokens,
                            uint32_t n_answer, uint32_t n_lines, const char *path, kvb_error *err);
