// Captures what commands write to a stream: SHOWN(1, code) leaves in `shown_text` what went to standard output, and
// SHOWN(2, code) what went to standard error.
#pragma once
#include "unit.h"

static char shown_text[1 << 16];

static inline int shown_begin(int stream, FILE *to)
{
    fflush(NULL);
    int before = dup(stream);
    ck_assert(to && dup2(fileno(to), stream) == stream);
    return before;
}

static inline void shown_end(int stream, int before, FILE *file)
{
    fflush(NULL);
    dup2(before, stream);
    close(before);
    rewind(file);
    shown_text[fread(shown_text, 1, sizeof shown_text - 1, file)] = '\0';
    fclose(file);
}

#define SHOWN(stream, ...)                      \
    do {                                        \
        FILE *to_ = tmpfile();                  \
        int before_ = shown_begin(stream, to_); \
        __VA_ARGS__;                            \
        shown_end(stream, before_, to_);        \
    } while (0)
