// A file of floats that a run which is stopped leaves for the one that goes on: a header, the floats, and one checksum
// of both. It is read on the machine and by the program that wrote it, so the floats stand as memory has them.
//
//     "kvbudget-kept 1\n"  16 bytes
//     key                  64 lower-case hex digits and "\n": what the floats belong to, a hash that the caller makes
//     layers               10 digits and "\n": how many layers' floats there are
//     floats               20 digits and "\n": how many floats follow
//     floats               4 bytes each
//     checksum             64 hex digits: SHA-256 of all bytes before it
#pragma once
#include "runtime/kvbudget.h"
#include <stddef.h>
#include <stdint.h>

enum { KEPT_HEADER = 113, KEPT_SUM = 64 }; // bytes

typedef struct kept_header {
    char key[65];
    uint32_t layers;
    uint64_t floats;
} kept_header;

// Bytes of a file of so many floats.
uint64_t kept_file_bytes(uint64_t floats);

// Reads the header of a whole file in memory. KVB_FORMAT names file, place and what was expected: other first bytes,
// digits that are none, a size that is not that of the floats.
kvb_status kept_header_read(kept_header *out, const void *data, size_t size, const char *name, kvb_error *err);

typedef struct kept_file kept_file;

// Writing: the file appears whole with kept_file_end, or not at all. Every float must be put, in order.
kvb_status kept_file_create(kept_file **out, const char *path, const kept_header *header, kvb_error *err);
kvb_status kept_file_put(kept_file *f, const float *from, uint64_t n, kvb_error *err);

// Reading; the header belongs to the file.
kvb_status kept_file_open(kept_file **out, const char *path, kvb_error *err);
const kept_header *kept_file_header(const kept_file *f);
kvb_status kept_file_get(kept_file *f, float *to, uint64_t n, kvb_error *err);

// Ends both, with the status of what was done so far: puts a written file in its place, or checks that all floats of
// one that is read were taken and that the checksum is theirs (KVB_FORMAT). Closes in any case; returns `status` when
// that is no success. NULL is allowed.
kvb_status kept_file_end(kept_file *f, kvb_status status, kvb_error *err);
