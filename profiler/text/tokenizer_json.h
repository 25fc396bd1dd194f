// Tokenizers of Hugging Face folders.
#pragma once
#include "profiler/text/tokenizer.h"

typedef struct json_text {
    const char *data; // NULL: there is no such file
    size_t size;
} json_text;

// A tokenizer from the bytes of tokenizer.json, tokenizer_config.json and generation_config.json (the last two may be
// missing). `name` is the folder, for messages. Errors: KVB_UNSUPPORTED (a model that is not BPE, a step that is not
// known), KVB_FORMAT (not JSON, parts that do not fit together). On failure *out is NULL.
kvb_status tokenizer_from_json(tokenizer **out, const char *name, json_text tokens, json_text config,
                               json_text generation, kvb_error *err);

// The tokenizer of a folder. Errors: as above, and KVB_IO, with what to do where there is no tokenizer.json.
kvb_status tokenizer_from_folder(tokenizer **out, const char *folder, kvb_error *err);
