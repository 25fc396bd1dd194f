// Where a metric's files go, and writing a picture there.
#pragma once
#include "tools/named_files.h"
#include "tools/report/picture.h"
#include <stdbool.h>

enum { PATH_SIZE = PICTURE_PATH_SIZE };

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

// Whether every metric's picture can be written, and in that form (picture.h).
kvb_status output_check_pictures(const char *pattern, const char *option, const char *const *metrics, size_t n,
                                 kvb_error *err);
// Begins the picture of a metric, an .svg where the pattern is a folder; picture_end() puts it in place, and says so.
kvb_status picture_begin(picture *p, const char *pattern, const char *metric, bool several, kvb_error *err);
kvb_status picture_end(picture *p, bool quiet, kvb_error *err);
