// Files and folders that appear whole or not at all: they are written under a temporary name in the same folder,
// synced, and renamed.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

// One file being written. `stream` is open for writing. A library that insists on a path may write to `temp_path`
// instead, which is the same file, if nothing is written to the stream. Paths belong to the struct.
typedef struct atomic_file {
    FILE *stream;     // repeats interrupted and short writes; has no descriptor (fileno) of its own
    char *temp_path;  // PATH.<8 hex digits>.partial
    char *final_path; // PATH, with a symbolic link resolved: the link stays and its target is replaced
    struct atomic_state *state;
} atomic_file;

// Makes the checks of atomic_file_begin without touching the disk. For outputs that are only written after long work.
// Errors: KVB_ARGUMENT (a folder, a device, a name too long), KVB_IO (no such folder, not writable, a read-only file, a
// link that leads nowhere).
kvb_status atomic_file_check(const char *path, kvb_error *err);

// Opens a temporary file next to `path` and removes those that writers of `path` left when they were killed (a living
// writer holds a lock on its own). Refuses a path that exists and is no regular file, since renaming over /dev/null
// would destroy it, a file that may not be written, and a symbolic link that leads nowhere. A file that is replaced
// keeps its mode. On failure *f is zero and nothing is left behind. Errors: as atomic_file_check.
kvb_status atomic_file_begin(atomic_file *f, const char *path, kvb_error *err);
// The same for a file in a folder that only this process writes to: a symbolic link at `path` is replaced, never
// followed, and stale temporary files are not looked for.
kvb_status atomic_file_begin_own(atomic_file *f, const char *path, kvb_error *err);

// Flushes, syncs, renames, syncs the folder. On failure the temporary file is gone and the old file is as it was,
// except when the very last step (syncing the folder) fails: then the new file is in place but might not survive a
// power cut. Afterwards *f is zero.
kvb_status atomic_file_commit(atomic_file *f, kvb_error *err);

// Closes and removes the temporary file. Does nothing on a zero struct, so it may be called after a commit.
void atomic_file_abandon(atomic_file *f);

// Begin, write `size` bytes, commit.
kvb_status atomic_write(const char *path, const void *data, size_t size, kvb_error *err);

// Removes the temporary files that writers of `path` left when they were killed; those of living ones stay.
void atomic_file_remove_stale(const char *path);
// Whether `name` is that of a temporary file for `base`.
bool atomic_file_is_partial(const char *name, const char *base, size_t base_length);

// Removes all files that are being written, before a signal or a lack of memory ends the program. From then on, any
// thread that begins or ends a file blocks forever.
void atomic_files_remove(void);

// A folder of files.
typedef struct atomic_folder {
    char *temp_path;  // where to put the files: DIR.<8 hex digits>.partial
    char *final_path; // DIR, with a symbolic link resolved
    int lock;         // tells others that the writer lives
    struct temporary *self;
} atomic_folder;

// Begins a folder that will appear at `dir`, which must be empty or not exist. Removes what killed writers of `dir`
// left behind. On failure *f is zero. Errors: KVB_ARGUMENT (not empty, not a folder), KVB_IO.
kvb_status atomic_folder_begin(atomic_folder *f, const char *dir, kvb_error *err);
// Puts the folder in place if `status` is KVB_OK, else removes it. Returns `status`, or what went wrong here.
kvb_status atomic_folder_end(atomic_folder *f, kvb_status status, kvb_error *err);
