// What a lukv-steps folder holds, by the names of its files and by its side file; no array is read.
#pragma once
#include "lukv_steps.h"
#include <stdbool.h>

typedef struct step_question {
    uint32_t number;
    bool has_oracle, has_suffix, has_answer;
} step_question;

typedef struct step_context {
    char *id;
    char **metric_files; // [n_metrics]
    size_t n_metrics;
    step_question *questions; // [n_questions]
    size_t n_questions;
    const cJSON *side; // its entry in the side file, or NULL
} step_context;

// An import under way.
typedef struct importer {
    const char *dir;
    const lukv_steps_options *options;
    cJSON *side; // the side file, or NULL
    step_context *contexts;
    size_t n;
    record_shape shape;
} importer;

// Fills contexts and side file: everything that has a name, questions by number, contexts in the order of the side file
// or else by name. Errors: KVB_IO, KVB_FORMAT, KVB_VERSION, KVB_MEMORY.
kvb_status lukv_scan(importer *in, kvb_error *err);
void lukv_scan_free(importer *in);

// The entry of a list in the side file whose `key` is `text` or, when that is NULL, `number`; NULL: none.
const cJSON *lukv_side_entry(const cJSON *list, const char *key, const char *text, double number);
// Whether a file is there that need not be; an error when that cannot be told, as without memory.
kvb_status lukv_find_optional(bool *found, const char *path, kvb_error *err);
kvb_status lukv_no_memory(const importer *in, kvb_error *err);
