// The manual in other forms than `kvbudget help` prints it: a page for man, and completion for two shells. All are made
// of the same texts and option tables, so none can say something else.
#pragma once
#include "tools/cli.h"
#include <stdio.h>

typedef struct manual {
    const char *introduction, *workflow; // lines that begin with a space stand as they are, others are running text
    const cli_command *const *commands;
    size_t n_commands;
} manual;

// `name` is "man" (roff, for man pages), "bash" or "zsh". Writes to standard output; false: another name, nothing was
// written. Calls every command's --help, whose options are known inside the command only.
bool manual_print(const manual *m, const char *name);
