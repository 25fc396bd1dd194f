// System calls on files that do the whole job: they are repeated when a signal interrupts them, and continued after a
// partial read or write. On failure errno says why.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

// Return the descriptor, or -1 on failure. `mode` only matters with O_CREAT. Child programs do not inherit the
// descriptor (O_CLOEXEC).
int file_open(const char *path, int flags, mode_t mode);
int file_open_at(int folder, const char *name, int flags, mode_t mode);
bool file_write_all(int file, const void *data, size_t size); // false: part of it may have been written
bool file_sync(int file);
bool file_truncate(int file, off_t size);
// Closes a descriptor that was written to. This one call must not be repeated: an interrupted close has closed the
// file.
bool file_close(int file);
// Takes an exclusive lock with flock(2). Returns false with EWOULDBLOCK if another process holds it, and true on file
// systems without locks.
bool file_lock(int file, bool wait);

// Syncs the folder that holds `path`: only then is a new or a removed name on the disk. Returns true on file systems
// that cannot sync folders.
bool file_sync_folder(const char *path);
// Returns the folder that holds `path`, or "." if there is no slash; the caller frees it.
char *file_folder(const char *path);
const char *file_base(const char *path); // what follows the last slash
bool path_exists(const char *path);      // a symbolic link exists wherever it leads

// Identifies an open file, to find out later whether it was changed or replaced.
typedef struct file_identity {
    dev_t device;
    ino_t inode;
    off_t size;
    struct timespec changed;
} file_identity;

bool file_identify(file_identity *out, int file);
bool file_same(const file_identity *a, const file_identity *b);
