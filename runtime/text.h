// Text from outside: file names, and what files say. Not part of the public API.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Bytes of the UTF-8 sequence at `at`, of which `left` >= 1 may be read: 1 to 4; 0 when there is none (a stray or
// missing continuation, an overlong form, a surrogate, beyond U+10FFFF).
size_t kvb_utf8_size(const char *at, size_t left);

// Puts a '?' in the place of every byte of a control character, which a terminal would obey, of a mark that changes the
// direction of writing, behind which a line reads as another one, and of every byte that is not UTF-8, which no JSON
// text may hold.
void kvb_clean_text(char *text);

bool kvb_ends_with(const char *text, const char *end);

// What a file of `size` bytes is by its first bytes. Operands are easily swapped; a reader that finds a file of another
// kind says which.
typedef enum kvb_file_kind {
    KVB_FILE_OTHER, // they do not tell, as with text
    KVB_FILE_MODEL,
    KVB_FILE_RECORD,
    KVB_FILE_ARRAY,
    KVB_FILE_SAFETENSORS // a table, a ranking, or weights
} kvb_file_kind;
kvb_file_kind kvb_kind_of_file(const void *data, size_t size);
// In words for messages: "a model (GGUF)"; of KVB_FILE_OTHER "something else".
const char *kvb_kind_name(kvb_file_kind kind);

// Reads the decimal digits at *text into *out and moves *text behind them. False without a digit or above `max`: then
// nothing is changed. Not strtoul, which takes signs and spaces.
bool kvb_read_digits(const char **text, uint64_t max, uint64_t *out);
