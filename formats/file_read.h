// A file as bytes in memory, read only.
#pragma once
#include "runtime/kvbudget.h"
#include <stddef.h>

typedef struct file_view {
    const unsigned char *data; // mapped; valid until file_unmap
    size_t size;               // > 0
} file_view;

// Maps a regular, non-empty file. A file that another program cuts short while it is mapped raises SIGBUS: that is how
// mmap works. On failure *out is zero. Errors: KVB_IO (cannot open or map), KVB_FORMAT (empty), KVB_ARGUMENT (a folder
// or device).
kvb_status file_map(file_view *out, const char *path, kvb_error *err);
// Gives back the memory of the pages that were read so far; they are read again when they are needed again.
void file_forget(const file_view *view);
void file_unmap(file_view *view); // a zero view is allowed; leaves *view zero
