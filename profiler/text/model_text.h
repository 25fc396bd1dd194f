// How a model reads and writes text: its tokenizer, its special tokens, and its chat template. The model itself
// (model.h) only knows token ids.
#pragma once
#include "profiler/text/tokenizer.h"
#include <stdbool.h>

struct weights;

// What a chat template puts around a user's message and before the answer. Compared with transformers by
// tests/peer/compare_chat.py.
typedef struct chat_frame {
    const char *kind; // "chatml", "llama3", "mistral", "gemma", "phi3", "phi4", "gpt-oss", or "other"
    char *front;      // from the beginning of the text to the message, without BOS
    char *back;       // from the message to where the answer begins
    bool bos;         // BOS comes first
    bool trim;        // spaces and line ends at both ends of the message are left out
} chat_frame;

// Finds the frame that a template puts around one user message, without a system message, when an answer is to follow;
// the template's default system text is part of `front`. The date is fixed to 26 July 2024, which Llama 3's own
// template uses when it has no clock, because a record must not depend on the day. `bos` and `eos` are the texts of
// these tokens, or NULL; `name` is the model, for messages. Fails with KVB_UNSUPPORTED if the template is broken, needs
// what jinja.h does not support, or does not put every message, once and whole, into the same frame. On failure *out is
// zero.
kvb_status chat_frame_read(chat_frame *out, const char *template, const char *bos, const char *eos, const char *name,
                           kvb_error *err);
// The same with the tokenizer's template and tokens. Also fails with KVB_UNSUPPORTED if it has no template.
kvb_status chat_frame_of(chat_frame *out, const tokenizer *t, const char *name, kvb_error *err);
void chat_frame_free(chat_frame *f); // leaves it zero

typedef struct model_text {
    char name[512];      // the model's path, for messages
    uint32_t vocabulary; // rows of the embedding: ids are below
    tokenizer *tokens;   // NULL: only token ids are taken (or, for a plan, texts are only counted)
    special_ids special; // -1 also if the token has no row in the embedding
    chat_frame chat;     // what contexts and questions are wrapped in (model_text_use_chat); kind NULL: nothing
    bool parse_special;  // recognise control tokens in texts; set by the caller
} model_text;

// Options of model_text_open; all zero means the defaults.
typedef struct model_text_options {
    bool without_tokenizer; // all token ids are given: the model may have any tokenizer, or none
    const char *pre;        // pre-tokenizer to use instead of the file's; NULL: the file's
    bool for_plan;          // a tokenizer that cannot be read counts as missing, unless `pre` is given
} model_text_options;

// Opens a model's tokenizer, from its GGUF file or its folder. `pre` is passed to tokenizer_from_gguf(); with a folder
// it must be NULL (KVB_ARGUMENT).
kvb_status tokenizer_open(tokenizer **out, const struct weights *w, const char *pre, kvb_error *err);

// Opens the text side of the model in `w`, whose embedding has `vocabulary` rows. `options` may be NULL. `w` is not
// needed afterwards. Errors: those of tokenizer_open, and KVB_FORMAT if texts begin with a token that has no row. On
// failure *out is zero.
kvb_status model_text_open(model_text *out, const struct weights *w, uint32_t vocabulary,
                           const model_text_options *options, kvb_error *err);
void model_text_close(model_text *t); // leaves it zero; a zero one is allowed

// From now on contexts and questions are wrapped in the model's chat template. Fails with KVB_ARGUMENT if there is no
// tokenizer, and with KVB_UNSUPPORTED if there is no template or it cannot be read.
kvb_status model_text_use_chat(model_text *t, kvb_error *err);
// Whether contexts begin with BOS, by the chat template if one is used, else by the tokenizer; false if there is no
// BOS.
bool model_text_begins_with_bos(const model_text *t);
// Whether this token ends an answer.
bool model_text_ends_answer(const model_text *t, int32_t id);

// The role of a text. With a chat template a context begins the message, and a question ends it, before the answer.
typedef enum text_part { TEXT_ALONE, TEXT_CONTEXT, TEXT_QUESTION } text_part;

// Encodes text to token ids (tokenizer_encode) without BOS; the caller frees *ids. Fails with KVB_ARGUMENT, naming the
// token, if a token has no row in the embedding: tokenizers of folders may have more tokens than the model. If opened
// for a plan without a tokenizer, it returns one token, 0, per four bytes. On failure *ids is NULL and *n 0.
kvb_status model_text_encode(const model_text *t, text_part part, const char *text, size_t size, int32_t **ids,
                             size_t *n, kvb_error *err);
// Encodes a question, which ends with a NUL, followed by the beginning of its answer.
kvb_status model_text_encode_question(const model_text *t, const char *text, const char *answer_prefix, int32_t **ids,
                                      size_t *n, kvb_error *err);
// Decodes ids to text that ends with a NUL; the caller frees it. *size (may be NULL) receives its length.
char *model_text_decode(const model_text *t, const int32_t *ids, size_t n, size_t *size);
