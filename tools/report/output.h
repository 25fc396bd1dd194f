// The names of the files that a command writes for its metrics.
#pragma once
#include "tools/named_files.h"
#include <stdbool.h>

enum { PATH_SIZE = 4096 };

// Writes to `out` the path of a metric's file. If `pattern` contains {metric}, that is replaced by the metric's name;
// if it is an existing folder, the file is NAME + extension in it; otherwise it is the path itself. In names, ':' and
// '=' become '_'. `several`: there are several metrics. Fails with KVB_ARGUMENT if several metrics would get the same
// path because of the pattern, or if the path does not fit.
kvb_status output_path(char out[PATH_SIZE], const char *pattern, const char *metric, const char *extension,
                       bool several, kvb_error *err);
// What an option writes for every metric.
typedef struct output_form {
    const char *option; // "--output"
    file_kind kind;
    const char *ending; // of files in a folder: ".safetensors"
} output_form;
// Checks, before any work is done, that each of the n metrics gets a file of its own, and registers the files with
// named_output(), whose errors it returns. Since ':' and '=' become '_', two metrics may have the same file name; that
// fails with KVB_ARGUMENT.
kvb_status output_check(const char *pattern, const output_form *form, const char *const *metrics, size_t n,
                        kvb_error *err);
