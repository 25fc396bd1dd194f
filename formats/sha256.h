// SHA-256 as 64 lower-case hexadecimal digits and a NUL. The work is done by libcrypto.
#pragma once
#include "runtime/kvbudget.h"
#include <stddef.h>

typedef struct sha256_state sha256_state; // for data that comes in pieces

sha256_state *sha256_begin(void);
void sha256_add(sha256_state *s, const void *data, size_t size);
void sha256_end(sha256_state *s, char out[65]); // frees `s`
void sha256_free(sha256_state *s);              // abandons a hash; NULL is allowed

void sha256_hex(const void *data, size_t size, char out[65]);
kvb_status sha256_file_hex(const char *path, char out[65], kvb_error *err);
// Hashes an open file from its first byte to its last without moving its position; `name` is for messages.
kvb_status sha256_descriptor_hex(int file, const char *name, char out[65], kvb_error *err);
