// Tasks: deterministic, as long as asked, with answers that the context really holds, and scored as RULER scores.
#include "evaluator/task_parts.h"
#include "unit.h"
#include <string.h>

// A byte-level tokenizer has a token per byte at most, which is all that fitting a length needs.
static tokenizer *tokens;

static void setup(void)
{
    kvb_error err;
    gguf_file file;
    ck_assert_msg(gguf_open(&file, getenv("KVB_TINY_MODEL"), &err) == KVB_OK, "%s", err.message);
    ck_assert_msg(tokenizer_from_gguf(&tokens, &file, &err) == KVB_OK, "%s", err.message);
    gguf_close(&file);
}
