// Files that appear whole or not at all: everything is written to a temporary file in the same folder, synced, and
// renamed.
#pragma once
#include "runtime/kvbudget.h"
#include <stddef.h>
#include <stdio.h>

// One file being written. `stream` is open for writing; a library that insists on a path may write to `temp_path`
// instead (after the stream was left untouched), since both are the same file. Paths belong to the struct.
typedef struct atomic_file {
    FILE *stream;
    char *temp_path;  // PATH.<8 hex digits>.partial
    char *final_path; // PATH, with a symbolic link resolved: the link stays and its target is replaced
} atomic_file;

// Opens a temporary file next to `path`. Refuses a path that exists and is no regular file (a folder, a device):
// renaming over /dev/null would destroy it. On failure *f is zero and nothing is left behind. Errors: KVB_IO,
// KVB_ARGUMENT, KVB_MEMORY.
kvb_status atomic_file_begin(atomic_file *f, const char *path, kvb_error *err);

// Flushes, syncs, renames, syncs the folder. On failure the temporary file is gone and the old file is as it was,
// except when the very last step (syncing the folder) fails: then the new file is in place but might not survive a
// power cut. *f is zero after it.
kvb_status atomic_file_commit(atomic_file *f, kvb_error *err);

// Closes and removes the temporary file. Does nothing on a zero struct, so it may be called after a commit.
void atomic_file_abandon(atomic_file *f);

// Begin, write `size` bytes, commit.
kvb_status atomic_write(const char *path, const void *data, size_t size, kvb_error *err);

// Removes the temporary files that writers of `path` left when they were killed. Only safe when no one else writes
// `path` now.
void atomic_file_remove_stale(const char *path);
