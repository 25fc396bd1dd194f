// What a command line reads and what it writes. Every file that it names is told here before any work is done, so that
// no output takes the place of an input, of another output, or of a file that is something else. cli_parse() tells what
// options and operands say; a command adds what only it knows, such as one file per metric.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

// What an output holds. A file that exists is replaced when it is empty or looks like one of these.
typedef enum file_kind {
    FILE_ANY, // only compared with what else is named: its kind is told later, or it may be a folder
    FILE_RECORD,
    FILE_TABLE,
    FILE_RANKING,
    FILE_ARRAY,       // .npy
    FILE_TABLE_ARRAY, // .npy, with the metadata in a .json beside it
    FILE_METADATA,    // that .json
    FILE_CSV,
    FILE_LINES,         // JSON, an object a line
    FILE_JSON,          // one object
    FILE_PICTURE,       // SVG
    FILE_PAGE,          // HTML
    FILE_RESULTS,       // results as JSON
    FILE_RESULTS_SET,   // NAME.json, NAME.csv, NAME.svg and NAME.cells
    FILE_REFINED_TABLE, // a table, with a log in FILE.cells
    FILE_LOG,           // its reader looks for itself
    FILE_KINDS,
    FILE_PER_METRIC = 64 // with one of these: a folder, or a name with {metric} in it, is told later, metric by metric
} file_kind;

// Forgets all files. `force`: files of another kind may be replaced, as --force says.
void named_files_begin(bool force);

// A file or folder that is read; a missing one is left to whoever reads it. Of `prefix=FILE` and `FILE:suffix`, and of
// a model in several files, all are meant that exist.
void named_input(const char *path);

// A file that will be written. `option` names who writes it: the same path may be told again under the same one.
// KVB_ARGUMENT: an empty name; one of the files that are read, or in a folder that is read and no file of this kind;
// what another option writes; a file of another kind, without --force. Symbolic links are followed, and a file that
// does not exist yet is known by its folder and name. Errors also: those of atomic_file_check(), but for FILE_ANY and
// records, whose writers look for themselves.
kvb_status named_output(const char *path, const char *option, unsigned kind, kvb_error *err);
