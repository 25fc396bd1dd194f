// SHA-256 (FIPS 180-4). Not part of the public API.
#pragma once
#include <stddef.h>

// A piece of the data to hash.
typedef struct kvb_bytes {
    const void *data;
    size_t size;
} kvb_bytes;

// The SHA-256 of n pieces one after the other, as 64 lower-case hexadecimal digits and a NUL. Does not allocate.
void kvb_sha256(const kvb_bytes *pieces, size_t n, char hex[65]);
