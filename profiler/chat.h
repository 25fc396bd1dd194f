// What a chat template puts around a user's message and before the answer. Templates are programs (Jinja); this reads
// no programs, it knows the kinds that the common families use by marks in their text: ChatML, Llama 3, Mistral, Gemma,
// Phi-3 and Phi-4, and gpt-oss. Judged against transformers by tools/peer/compare_chat.py.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

typedef struct chat_frame {
    const char *kind; // "chatml", "llama3", "mistral", "gemma", "phi3", "phi4", "gpt-oss"
    char *front;      // from the begin of the text to the message, without BOS
    char *back;       // from the message to where the answer begins
    bool bos;         // BOS stands in front of it all
    bool trim;        // spaces and line ends at both ends of the message are left out
} chat_frame;

// For one message of a user without a system message, where an answer is to follow: the default system text of the
// template is part of `front`, today's date is 26 Jul 2024 (the one that Llama 3's own template has where it knows
// none), since a record must not depend on the day. `name` is the model, for messages. KVB_UNSUPPORTED: another kind,
// or one that this reader cannot be sure of; KVB_MEMORY. On failure *out is zero.
kvb_status chat_frame_read(chat_frame *out, const char *jinja, const char *name, kvb_error *err);
void chat_frame_free(chat_frame *f); // leaves it zero
