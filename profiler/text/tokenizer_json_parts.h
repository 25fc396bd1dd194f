// What the readers of tokenizer.json share; nobody else includes this.
#pragma once
#include "profiler/text/tokenizer_parts.h"
#include <cjson/cJSON.h>

typedef struct json_reader {
    tokenizer *t;
    const char *name; // folder, for messages
    kvb_error *err;
} json_reader;

const cJSON *json_item(const cJSON *object, const char *key);         // NULL: not there
const char *json_string(const cJSON *object, const char *key);        // NULL: not a string
bool json_is_type(const cJSON *step, const char *type);               // its "type"
bool json_flag(const cJSON *object, const char *key, bool otherwise); // where there is no boolean
int64_t json_id(const cJSON *number);                                 // a token id, or -1 where it is none
kvb_status json_no_memory(const json_reader *r);
// KVB_UNSUPPORTED: "NAME: PLACE: expected EXPECTED, found FOUND"; found may be NULL.
kvb_status json_refuse(const json_reader *r, const char *place, const char *expected, const char *found);

// Fills t->normal from "normalizer", t->before_words, t->cuts and t->byte_level from "pre_tokenizer".
kvb_status json_read_steps(const json_reader *r, const cJSON *root);
// Fills the vocabulary, merges and the model's flags from "model" and "added_tokens" (tokenizer_json_vocab.c).
kvb_status json_read_vocabulary(const json_reader *r, const cJSON *root);
// Indexes the added tokens; t->normal and the vocabulary are there.
kvb_status json_read_added(const json_reader *r, const cJSON *root);
