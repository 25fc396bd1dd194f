// What `kvbudget inspect` says of a learned ranking and of a record's answers: each adds to a JSON document.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// Shape, what the ranking says of itself, and how much its heads weigh each feature on average. Errors: those of
// kvb_ranking_open().
kvb_status inspect_ranking(cJSON *doc, const char *path, kvb_error *err);

// Adds to `doc` the list "answers": for every question of the record at `path` what was asked (question, answer prefix
// and, with a chat template, what that puts between) and answered, given or sampled, decoded by the tokenizer of
// `model` (a GGUF file or a folder; no weights are read); `pre` as in tokenizer_open. KVB_MISMATCH: another tokenizer
// than the record's.
kvb_status inspect_answers(cJSON *doc, const char *path, const char *model, const char *pre, kvb_error *err);
