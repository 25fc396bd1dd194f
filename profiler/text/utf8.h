// Broken UTF-8, read as Python's bytes.decode('utf-8', errors='replace') and web browsers do.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>

// Returns the length of the character at p (n > 0 bytes are there). Sets *valid to false for a broken one and then
// returns the length of its longest part that could begin a character (at least 1), which one U+FFFD replaces.
size_t utf8_step(const unsigned char *p, size_t n, bool *valid);
// Sets *out to text with each broken part replaced by U+FFFD: malloc'd in *owned, or the text itself and *owned NULL
// when nothing is broken.
void utf8_repair(const char *text, size_t size, const char **out, size_t *out_size, char **owned);

// Checks that a text is UTF-8 without NUL. Otherwise fails with KVB_FORMAT and the place of the first wrong byte: a
// file of another kind or encoding, such as UTF-16, would silently become many U+FFFD. `name` is for the message.
kvb_status utf8_check_text(const char *name, const char *text, size_t size, kvb_error *err);

// Returns the number of bytes at the text's beginning, or end, that Python's str.strip() would remove.
size_t utf8_spaces_before(const char *text, size_t size);
size_t utf8_spaces_behind(const char *text, size_t size);
