// A file of floats that a stopped run leaves for the run that resumes it: a header, the floats, and one checksum of
// both. The same program on the same machine reads it, so the floats are stored as they are in memory.
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

// Returns the size in bytes of a file with this many floats.
uint64_t kept_file_bytes(uint64_t floats);

// Reads the header of a whole file in memory. Fails with KVB_FORMAT if the first bytes are wrong, a character that
// should be a digit is not, or the size does not match the number of floats; the message names the file, the place and
// what was expected.
kvb_status kept_header_read(kept_header *out, const void *data, size_t size, const char *name, kvb_error *err);

typedef struct kept_file kept_file;

// Writing. The file appears, complete, when kept_file_end succeeds. Every float must be put, in order.
kvb_status kept_file_create(kept_file **out, const char *path, const kept_header *header, kvb_error *err);
kvb_status kept_file_put(kept_file *f, const float *from, uint64_t n, kvb_error *err);

// Reading; the header belongs to the file.
kvb_status kept_file_open(kept_file **out, const char *path, kvb_error *err);
const kept_header *kept_file_header(const kept_file *f);
kvb_status kept_file_get(kept_file *f, float *to, uint64_t n, kvb_error *err);

// Ends reading or writing; `status` says how it went so far. If that is KVB_OK, puts a written file in place, or checks
// that all floats were read and the checksum is right (KVB_FORMAT). Always closes; returns `status` if it is a failure.
// `f` may be NULL.
kvb_status kept_file_end(kept_file *f, kvb_status status, kvb_error *err);
