// Text to token ids and back. Byte-level BPE ("gpt2": smollm, llama-bpe, qwen2, gpt-2, gpt-4o, tekken, dbrx and the
// names that stand for them) and SentencePiece's BPE with byte fallback ("llama") from the vocabulary inside a GGUF
// file, and those of Hugging Face folders. tests/peer/train_tokenizers.py compares them with their own libraries.
//
// Input that is not UTF-8 is read as Python's bytes.decode('utf-8', errors='replace') does: each maximal part of a
// broken sequence becomes U+FFFD (the WHATWG rule). NUL bytes are text like any other. From GGUF no Unicode
// normalisation is applied, since the file asks for none (Qwen's tokenizer.json does ask for NFC, and gets it).
//
// smollm splits digits one by one, like SmolLM2's own tokenizer.json and llama.cpp. The tokenizer that transformers
// makes from a GGUF file lacks that step, and differs if two or more spaces or line ends come before a digit
// ("\n\n1."): tokenizer_from_gguf(.., "gpt-2", ..) gives those ids. tests/peer/compare_tokens.py compares both.
//
// A byte without a token (SmolLM2 lacks 21 rare ones) becomes tokenizer.ggml.unknown_token_id, once for a run of them
// within a word; if the file names no such token, the byte is dropped. Hugging Face's tokenizers do the same.
//
// A tokenizer is immutable and does not need the GGUF once made; any number of threads may share one.
#pragma once
#include "profiler/weights/gguf.h"
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct tokenizer tokenizer;

// Makes a tokenizer from tokenizer.ggml.{model, pre, tokens, token_type, merges, ...}. On failure *out is NULL.
// Errors: KVB_UNSUPPORTED (another kind of tokenizer, an unknown or missing pre-tokenizer; the message lists the
// known ones), KVB_FORMAT (arrays that do not fit together, a merge of unknown tokens). `pre`: another pre-tokenizer
// than the file names; NULL: the file's.
kvb_status tokenizer_from_gguf(tokenizer **out, const gguf_file *f, const char *pre, kvb_error *err);

// The JSON files of a Hugging Face folder.
typedef struct json_text {
    const char *data; // NULL: there is no such file
    size_t size;
} json_text;

// Makes a tokenizer from the bytes of tokenizer.json, tokenizer_config.json and generation_config.json (the last two
// may be missing). `name` is the folder, for messages. Errors: KVB_UNSUPPORTED (a model that is not BPE, an unknown
// step), KVB_FORMAT (not JSON, parts that do not fit together). On failure *out is NULL.
kvb_status tokenizer_from_json(tokenizer **out, const char *name, json_text tokens, json_text config,
                               json_text generation, kvb_error *err);

// Reads the tokenizer of a folder. Errors: as above, and KVB_IO, which says what to do if there is no tokenizer.json.
kvb_status tokenizer_from_folder(tokenizer **out, const char *folder, kvb_error *err);

void tokenizer_free(tokenizer *t);

// Encodes `size` bytes. Never adds BOS. *ids is malloc'd and the caller's to free; not NULL even when *n is 0.
// User-defined tokens of the vocabulary are always found in the text; control tokens ("<|im_start|>") only with
// parse_special, else they are encoded as plain text. The leftmost, then the longest, match wins. Errors: KVB_ARGUMENT
// (over 1 GiB of text), KVB_UNSUPPORTED (an expression of the tokenizer that backtracks for too long, or a normaliser
// that makes too much of the text). On failure *ids is NULL and *n 0.
kvb_status tokenizer_encode(const tokenizer *t, const char *text, size_t size, bool parse_special, int32_t **ids,
                            size_t *n, kvb_error *err);

// The same for a text in a frame, such as a chat template's: front, text and back are encoded as one text. In front and
// back (UTF-8, ending with a NUL) control tokens are always recognised.
kvb_status tokenizer_encode_framed(const tokenizer *t, const char *front, const char *text, size_t size,
                                   const char *back, bool parse_special, int32_t **ids, size_t *n, kvb_error *err);

// Writes at most `cap` bytes of the decoded text to out (may be NULL when cap is 0; no terminating NUL) and returns
// the bytes that the whole text has. Special tokens decode to their text, ids out of range to nothing. One id may be
// only part of a character.
size_t tokenizer_decode(const tokenizer *t, const int32_t *ids, size_t n, char *out, size_t cap);

// Token ids, -1 if the model's files name none.
typedef struct special_ids {
    int32_t bos, eos, eot; // eot: end of a chat turn if that is not EOS
    bool add_bos; // texts begin with bos; if a GGUF file does not say, its kind of tokenizer decides, as in llama.cpp
} special_ids;

special_ids tokenizer_special(const tokenizer *t);
size_t tokenizer_size(const tokenizer *t); // ids are 0 .. size-1
const char *tokenizer_pre(const tokenizer *t);
// Whether the token ends an answer: EOS, the end of a chat turn, and what generation_config.json lists.
bool tokenizer_is_end(const tokenizer *t, int32_t id);
const char *tokenizer_chat_template(const tokenizer *t); // Jinja text, or NULL
// SHA-256 (hex) over tokens, types, merges, and the pre-tokenizer's name; tokenizer.c gives the layout.
const char *tokenizer_sha256(const tokenizer *t);
