// Text in an HTML page, whatever the bytes are: names of files and metadata come from anybody.
#pragma once
#include <stdio.h>

// Escaped for the text of an element and for a quoted attribute. Control characters become '?', bytes that are not
// UTF-8 the replacement character, and so do the characters that turn the direction of writing, which could make a
// name look like another one.
void html_put(FILE *out, const char *text);
// Formatted, then escaped.
void html_putf(FILE *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

// A word of a shell's command line, in quotes where it needs them.
void html_shell_word(FILE *out, const char *word);
