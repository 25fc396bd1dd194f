// Where a metric's files go.
#pragma once
#include "tools/named_files.h"
#include <stdbool.h>

enum { PATH_SIZE = 4096 };

// `pattern` with {metric} replaced, or in the folder `pattern`, or, unless there are several metrics, just so.
// KVB_ARGUMENT: a pattern that does not tell metrics apart, or a path that is too long.
kvb_status output_path(char out[PATH_SIZE], const char *pattern, const char *metric, const char *extension,
                       bool several, kvb_error *err);
// What an option writes for every metric; `ending` is that of files in a folder.
typedef struct output_form {
    const char *option;
    file_kind kind;
    const char *ending;
} output_form;
// Whether every one of the metrics gets a file of its own, before any work is done. Names of files have no ':' and '=',
// so two metrics may ask for the same one, and the later would replace the earlier: KVB_ARGUMENT.
// Errors also: those of named_output().
kvb_status output_check(const char *pattern, const output_form *form, const char *const *metrics, size_t n,
                        kvb_error *err);

// Pictures are SVG; rsvg-convert makes PDF and PNG of it. KVB_ARGUMENT: a name that does not end in .svg.
kvb_status picture_check(const char *path, kvb_error *err);
