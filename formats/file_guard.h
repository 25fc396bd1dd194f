// Mapped files that another program cuts short, or whose disk fails, raise SIGBUS when they are read. Reading with
// pread instead would need a second copy of every weight; here a handler puts zeros where the file has ended and
// remembers it, so that reading goes on harmlessly, on any thread, and whoever reads asks afterwards (file_check).
#pragma once
#include <stdbool.h>
#include <stddef.h>

// Guards a mapping until file_guard_end; the handler is installed with the first one. -1 when too many are guarded at
// once: then reading past the end kills the program, as it does without a guard.
int file_guard_begin(const void *data, size_t size);
// Was something missing? False for -1.
bool file_guard_hit(int guard);
void file_guard_end(int guard);
