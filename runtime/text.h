// Text from outside: file names, and what files say. Not part of the public API.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Bytes of the UTF-8 sequence at `at`, of which `left` >= 1 may be read: 1 to 4; 0 when there is none (a stray or
// missing continuation, an overlong form, a surrogate, beyond U+10FFFF).
size_t kvb_utf8_size(const char *at, size_t left);

// Puts a '?' in the place of every byte of a control character, which a terminal would obey, and of every byte that is
// not UTF-8, which no JSON text may hold.
void kvb_clean_text(char *text);

// What a file of `size` bytes is by its first bytes, in words for messages (a static string): a model, a record, a
// table, an array. NULL when they do not tell, as with text. Operands are easily swapped; a reader that finds a file of
// another kind says which.
const char *kvb_binary_kind(const void *data, size_t size);
extern const char kvb_kind_safetensors[]; // what it returns for a table

// Reads the decimal digits at *text into *out and moves *text behind them. False without a digit or above `max`: then
// nothing is changed. Not strtoul, which takes signs and spaces.
bool kvb_read_digits(const char **text, uint64_t max, uint64_t *out);
