// Text from outside: file names, and what files say. Not part of the public API.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Returns the length of the UTF-8 sequence at `at`, 1 to 4 bytes, or 0 if the bytes are not valid UTF-8 (a stray or
// missing continuation byte, an overlong form, a surrogate, beyond U+10FFFF). `left` >= 1 bytes may be read.
size_t kvb_utf8_size(const char *at, size_t left);

// Whether a character of `size` = kvb_utf8_size() bytes may be shown as it is; see kvb_clean_text(). False for size 0.
bool kvb_is_shown(const char *at, size_t size);

// Replaces bytes of `text` by '?': those of control characters, which a terminal would obey; of marks that change the
// direction of writing, which make a line look like a different one; and bytes that are not UTF-8, which JSON forbids.
void kvb_clean_text(char *text);

bool kvb_ends_with(const char *text, const char *end);

// The kind of a file, as its first bytes tell it. Command-line operands are easily swapped, so a reader that gets the
// wrong kind says which kind it got.
typedef enum kvb_file_kind {
    KVB_FILE_OTHER, // they do not tell, as with text
    KVB_FILE_MODEL,
    KVB_FILE_RECORD,
    KVB_FILE_ARRAY,
    KVB_FILE_SAFETENSORS // a table, a ranking, or weights
} kvb_file_kind;
kvb_file_kind kvb_kind_of_file(const void *data, size_t size);
// Names a kind for messages: "a model (GGUF)"; KVB_FILE_OTHER is "something else".
const char *kvb_kind_name(kvb_file_kind kind);

// Reads the decimal digits at *text into *out and moves *text past them. Returns false, and changes nothing, if there
// is no digit or the number is above `max`. Unlike strtoul it takes no signs or spaces.
bool kvb_read_digits(const char **text, uint64_t max, uint64_t *out);
