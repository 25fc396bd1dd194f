// What a chat template puts around a user's message and before the answer. A template is a program (Jinja): it is run
// (jinja.h) on messages whose words it cannot know, and what stands around them is the frame. Judged against
// transformers by tests/peer/compare_chat.py.
#pragma once
#include "profiler/text/tokenizer.h"
#include <stdbool.h>

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
// the model, for messages. KVB_UNSUPPORTED: the template is broken, wants what jinja.h does not read, or does not
// put every message once, and whole, in the same frame. On failure *out is zero.
kvb_status chat_frame_read(chat_frame *out, const char *template, const char *bos, const char *eos, const char *name,
                           kvb_error *err);
// The same with the tokenizer's template and tokens. KVB_UNSUPPORTED also: it has no template.
kvb_status chat_frame_of(chat_frame *out, const tokenizer *t, const char *name, kvb_error *err);
void chat_frame_free(chat_frame *f); // leaves it zero
