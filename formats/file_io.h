// System calls on files that finish their work: repeated when a signal interrupts them, continued when only a part was
// done. errno says what went wrong.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

// -1 when it cannot be opened; `mode` counts with O_CREAT only. Descriptors are closed in programs that are started.
int file_open(const char *path, int flags, mode_t mode);
int file_open_at(int folder, const char *name, int flags, mode_t mode);
bool file_write_all(int file, const void *data, size_t size); // false: some of it may be written
bool file_sync(int file);
bool file_truncate(int file, off_t size);
// Closes a descriptor that was written to. The one call that must not be repeated: an interrupted close has closed.
bool file_close(int file);
// flock(2). False with EWOULDBLOCK when another process holds it; true where the file system has no locks.
bool file_lock(int file, bool wait);

// The name's folder, synced: a new name, or one that is gone, is on the disk only after it. File systems that cannot
// sync folders count as synced.
bool file_sync_folder(const char *path);
// The folder that holds `path`, "." when there is no slash; malloc'd.
char *file_folder(const char *path);
const char *file_base(const char *path); // what follows the last slash

// What tells that an open file has not been changed or put under another name.
typedef struct file_identity {
    dev_t device;
    ino_t inode;
    off_t size;
    struct timespec changed;
} file_identity;

bool file_identify(file_identity *out, int file);
bool file_same(const file_identity *a, const file_identity *b);
