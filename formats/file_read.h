// A file as bytes in memory, read only.
#pragma once
#include "runtime/kvbudget.h"
#include <stddef.h>
#include <time.h>

typedef struct file_view {
    const unsigned char *data; // mapped; valid until file_unmap
    size_t size;               // > 0
    int fd, guard;             // of the mapping; unused if data is NULL
    struct timespec changed;   // time of the last change when it was mapped
} file_view;

// Maps a regular, non-empty file. If another program truncates it while it is mapped, or the disk fails, zeros are read
// instead, and file_check() reports it. On failure *out is zero. Errors: KVB_IO (cannot open or map), KVB_FORMAT
// (empty), KVB_ARGUMENT (a folder or device).
kvb_status file_map(file_view *out, const char *path, kvb_error *err);
// Checks that the file stayed complete and unchanged while it was mapped. Call it after the last read; if it fails with
// KVB_IO, discard what was read. `path` is for the message. A zero view is allowed.
kvb_status file_check(const file_view *view, const char *path, kvb_error *err);
// Releases the memory of the pages read so far; they are read again from the file when needed.
void file_forget(const file_view *view);
void file_unmap(file_view *view); // a zero view is allowed; leaves *view zero
