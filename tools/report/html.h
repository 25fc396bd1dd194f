// Writes text into an HTML page safely, whatever its bytes are: names of files and metadata may come from anybody.
// Write errors are left to ferror(out).
#pragma once
#include <stdio.h>

// Writes text, escaped for the content of an element or for a quoted attribute. Control characters become '?'. Bytes
// that are not UTF-8 become the replacement character, and so do other characters that kvb_clean_text() takes out: some
// change the writing direction and could make one name look like another.
void html_put(FILE *out, const char *text);
// Writes markup as it is, with a text in the place of every "%s", as html_put() writes it.
void html_fill(FILE *out, const char *markup, ...) __attribute__((format(printf, 2, 3)));

// Writes one word of a shell command, escaped for HTML and quoted for the shell if it needs that.
void html_shell_word(FILE *out, const char *word);
