// The files that a command line reads and writes. Every one is registered here before any work begins, so that no
// output can overwrite an input, another output, or a file of another kind. cli_parse() registers what options and
// operands name; a command registers what only it knows, such as one file per metric. Not for use from several threads.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

// What an output will hold. An existing file may be replaced if it is empty or looks like a file of this kind.
typedef enum file_kind {
    FILE_ANY, // only compared with the other files: its kind is registered later, or it may be a folder
    FILE_RECORD,
    FILE_TABLE,
    FILE_RANKING,
    FILE_ARRAY,       // .npy
    FILE_TABLE_ARRAY, // .npy, with the metadata in a .json beside it
    FILE_METADATA,    // that .json
    FILE_CSV,
    FILE_LINES,         // JSON, an object a line
    FILE_LENGTHS,       // JSON of export --format per-layer
    FILE_SHARES,        // JSON of export --format shares
    FILE_PICTURE,       // SVG
    FILE_PAGE,          // HTML
    FILE_RESULTS,       // results as JSON
    FILE_RESULTS_SET,   // NAME.json, NAME.csv, NAME.svg and NAME.cells
    FILE_REFINED_TABLE, // a table, with a log in FILE.cells
    FILE_LOG,           // checked by the code that reads it
    FILE_KINDS,
    FILE_PER_METRIC = 64 // added to one of these: a folder or a name with {metric}; its files are registered later
} file_kind;

// Forgets all registered files. `force`: outputs may replace files of another kind (--force).
void named_files_begin(bool force);

// Registers a file or folder that will be read. It need not exist: the code that reads it reports that. In
// `prefix=FILE` and `FILE:suffix` both FILE and the whole name are registered, if they exist. One file of a model in
// parts stands for all parts, and NAME.npy for NAME.json too.
void named_input(const char *path);

// Registers a file that will be written; `kind` is a file_kind, with FILE_PER_METRIC or without. `option` says which
// option names it ("--output"): the same path may be registered again for the same option. Paths are compared after
// following symbolic links; a file that does not exist yet is identified by its folder and its name. Touches no file.
// Fails with KVB_ARGUMENT if
//   - the name is empty;
//   - the file is also read, or lies in a folder that is read without being a file of this kind;
//   - another option writes the same file;
//   - the file exists, is of another kind, and `force` is not set.
// Also returns the errors of atomic_file_check(), except for FILE_ANY and records, which their writers check
// themselves.
kvb_status named_output(const char *path, const char *option, unsigned kind, kvb_error *err);
