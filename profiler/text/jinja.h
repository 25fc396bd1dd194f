// Jinja, the language of chat templates, as far as they use it: what a template makes of one message of a user.
// No C library reads it. Statements: if, for, set, macro, break, continue, generation; expressions: all but floats and
// powers; of filters, tests, methods and functions those of jinja_builtins.c. Spaces between tags are written and left
// out as transformers has it (trim_blocks, lstrip_blocks). Nothing is guessed: what this reader does not know fails
// where it is met, and what is not met does not matter. Judged by Jinja2 itself (tests/golden/jinja.json).
#pragma once
#include "runtime/kvbudget.h"

typedef struct jinja_input {
    const char *message;   // messages is [{role: user, content: message}], add_generation_prompt is true
    const char *bos, *eos; // bos_token and eos_token; NULL: not defined
} jinja_input;

// Any bytes are a template. *out is malloc'd and the caller's to free. Today is 26 July 2024 (chat.h says why). `name`
// is the model, for messages. KVB_UNSUPPORTED: the template is broken, raises an exception, or needs what is not known
// here, with its line; or it takes too many steps or too much memory. KVB_MEMORY. On failure *out is NULL.
kvb_status jinja_render(char **out, const char *source, const jinja_input *in, const char *name, kvb_error *err);
