#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>

// Adds to `doc` the list "answers": for every question of the record at `path` what was asked (question, answer prefix
// and, with a chat template, what that puts between) and answered, given or sampled, decoded by the tokenizer of
// `model` (a GGUF file or a folder; no weights are read); `pre` as in tokenizer_open. KVB_MISMATCH: another
// tokenizer than the record's.
kvb_status inspect_answers(cJSON *doc, const char *path, const char *model, const char *pre, kvb_error *err);
