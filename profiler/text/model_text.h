// How one model reads and writes text: its tokenizer, the special tokens that its files name, and the chat template
// that texts are wrapped in. The model itself (model.h) knows token ids only.
#pragma once
#include "profiler/text/tokenizer.h"
#include <stdbool.h>

// What a chat template puts around a user's message and before the answer. Judged against transformers by
// tests/peer/compare_chat.py.
typedef struct chat_frame {
    const char *kind; // "chatml", "llama3", "mistral", "gemma", "phi3", "phi4", "gpt-oss", or "other"
    char *front;      // from the begin of the text to the message, without BOS
    char *back;       // from the message to where the answer begins
    bool bos;         // BOS stands in front of it all
    bool trim;        // spaces and line ends at both ends of the message are left out
} chat_frame;

// For one message of a user without a system message, where an answer is to follow: the default system text of the
// template is part of `front`. Today is 26 July 2024 (the day that Llama 3's own template has for want of a clock),
// since a record must not depend on the day. `bos` and `eos` are these tokens' texts, NULL: there are none; `name` is
// the model, for messages. KVB_UNSUPPORTED: the template is broken, wants what jinja.h does not read, or does not put
// every message once, and whole, in the same frame. On failure *out is zero.
kvb_status chat_frame_read(chat_frame *out, const char *template, const char *bos, const char *eos, const char *name,
                           kvb_error *err);
// The same with the tokenizer's template and tokens. KVB_UNSUPPORTED also: it has no template.
kvb_status chat_frame_of(chat_frame *out, const tokenizer *t, const char *name, kvb_error *err);
void chat_frame_free(chat_frame *f); // leaves it zero

typedef struct model_text {
    char name[512];      // the model's path, for messages
    uint32_t vocabulary; // rows of the embedding: ids are below
    tokenizer *tokens;   // NULL: only token ids are taken (or, for a plan, texts are only counted)
    special_ids special; // -1 also where one has no row of the embedding
    chat_frame chat;     // what contexts and questions are wrapped in (model_text_use_chat); kind NULL: nothing
    bool parse_special;  // control tokens are found in texts; the caller's to set
} model_text;

// What may be wished of model_text_open; zero: nothing.
typedef struct model_text_options {
    bool without_tokenizer; // all token ids are given: the model may have any tokenizer, or none
    const char *pre;        // another pre-tokenizer than the file names; NULL: the file's
    bool for_plan;          // a tokenizer that cannot be read counts as missing, unless `pre` is given
} model_text_options;

// Opens the text side of the model that `w` has the weights of, with so many rows of the embedding. `options` NULL:
// none. What is opened does not need `w` afterwards. Errors are tokenizer_open's, and KVB_FORMAT where texts begin with
// a token that has no row. On failure *out is zero.
kvb_status model_text_open(model_text *out, const struct weights *w, uint32_t vocabulary,
                           const model_text_options *options, kvb_error *err);
void model_text_close(model_text *t); // leaves it zero; a zero one is allowed

// From here on contexts and questions are wrapped in the model's own chat template. KVB_ARGUMENT: there is no
// tokenizer; KVB_UNSUPPORTED: no template, or one that cannot be read.
kvb_status model_text_use_chat(model_text *t, kvb_error *err);
// Does BOS stand in front of contexts? As the chat template says, else as the tokenizer; false where there is no BOS.
bool model_text_begins_with_bos(const model_text *t);
// Does this token end an answer?
bool model_text_ends_answer(const model_text *t, int32_t id);

// What a text is: with a chat template a context begins the message, a question ends it and the answer is to follow.
typedef enum text_part { TEXT_ALONE, TEXT_CONTEXT, TEXT_QUESTION } text_part;

// Text to token ids (tokenizer_encode) without BOS; *ids is malloc'd, the caller's to free. A token without a row of
// the embedding is KVB_ARGUMENT, which names it: tokenizers of folders may know more tokens than the model. Opened for
// a plan and without a tokenizer, tokens are only counted, one for four bytes, and are all 0. On failure *ids is NULL
// and *n 0.
kvb_status model_text_encode(const model_text *t, text_part part, const char *text, size_t size, int32_t **ids,
                             size_t *n, kvb_error *err);
// A question, ending with a NUL, and behind it the beginning of its answer.
kvb_status model_text_encode_question(const model_text *t, const char *text, const char *answer_prefix, int32_t **ids,
                                      size_t *n, kvb_error *err);
// Ids to text, ending with a NUL; malloc'd, the caller's to free. *size (may be NULL) is its length.
char *model_text_decode(const model_text *t, const int32_t *ids, size_t n, size_t *size);
