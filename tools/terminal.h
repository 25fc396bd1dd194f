// Standard output and standard error. What the program prints contains names of files and texts from files, and a
// terminal must not obey control characters in those. So everything is filtered, except what the program prints with
// terminal_sequence().
#pragma once
#include <stdio.h>

// Filters both streams from now on: control characters other than newline and tab, characters that change the writing
// direction, and bytes that are not UTF-8 are printed as \u001b, \u202e and \x9b. In JSON, the first two mean the same
// text as before. If the reader of a pipe is gone, the program ends as by SIGPIPE. Call once, before anything is
// printed.
void terminal_guard_streams(void);

// Prints, like printf, an escape sequence or a carriage return that the terminal is to obey.
void terminal_sequence(FILE *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Flushes standard output. Returns NULL, or a message that says why not everything could be written.
const char *terminal_output_failure(void);
