// A file as bytes in memory, read only.
#pragma once
#include "runtime/kvbudget.h"
#include <stddef.h>
#include <time.h>

typedef struct file_view {
    const unsigned char *data; // mapped; valid until file_unmap
    size_t size;               // > 0
    int fd, guard;             // of the mapping; of no interest where data is NULL
    struct timespec changed;   // last, when it was mapped
} file_view;

// Maps a regular, non-empty file. Where another program cuts it short while it is mapped, or the disk fails, zeros are
// read, and file_check tells. On failure *out is zero. Errors: KVB_IO (cannot open or map), KVB_FORMAT
// (empty), KVB_ARGUMENT (a folder or device).
kvb_status file_map(file_view *out, const char *path, kvb_error *err);
// Was the file whole and the same for as long as it was mapped? Asked when all has been read; KVB_IO otherwise, and
// then what was read is of no use. `path` is for the message. A zero view is allowed.
kvb_status file_check(const file_view *view, const char *path, kvb_error *err);
// Gives back the memory of the pages that were read so far; they are read again when they are needed again.
void file_forget(const file_view *view);
void file_unmap(file_view *view); // a zero view is allowed; leaves *view zero
