// Standard output and standard error. All that the program prints goes through them, and names of files and texts out
// of files are in it: a terminal must not obey those. Escape sequences of the program's own are told apart by how they
// are printed.
#pragma once
#include <stdio.h>

// From here on a control character in what is printed, one that changes the direction of writing, and a byte that is no
// UTF-8 appear as \u001b, \u202e and \x9b; newlines and tabs stay. In JSON that is the same text. A reader that is gone
// ends the program as SIGPIPE does.
void terminal_guard_streams(void);

// An escape sequence or a carriage return of the program's own, as printf.
void terminal_sequence(FILE *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

// A text that was asked for byte by byte: just so into files and pipes, as all else on a terminal.
void terminal_put_bytes(const void *bytes, size_t size);

// Flushes standard output; why not all of it could be written, or NULL.
const char *terminal_output_failure(void);
