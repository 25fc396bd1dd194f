// The safetensors container: 8 bytes of header length (little-endian), a JSON header, then the tensors' bytes.
// Knows nothing of tables; not part of the public API. Specification: the safetensors README, "Format".
#pragma once
#include "kvbudget.h"
#include <stdbool.h>

#define KVB_TENSOR_MAX_DIMS 8

// One tensor of a parsed file. `name` and `dtype` belong to the kvb_safetensors, `data` points into the caller's
// buffer and has no alignment.
typedef struct kvb_tensor {
    const char *name;
    const char *dtype; // "F64", "U8", ... as in the file
    uint32_t n_dims;
    uint64_t shape[KVB_TENSOR_MAX_DIMS]; // row-major: the last dimension is contiguous
    const unsigned char *data;
    size_t size; // bytes; always the product of shape times the element size
} kvb_tensor;

typedef struct kvb_safetensors {
    const char *name;    // file name for messages; at most the last 160 characters of what the caller gave
    kvb_tensor *tensors; // sorted by name
    size_t n_tensors;
    struct cJSON *header; // owns all names
} kvb_safetensors;

// Parses `size` bytes at `data`, which must stay alive as long as tensors are used, as must `name`. Accepts only what
// the specification allows: names are unique, every tensor's byte range has the size that its shape and dtype ask
// for, and the ranges fill the data part without overlap or hole; metadata values are strings; and if the file holds a
// hash of itself, the hash is right (KVB_CONTENT_KEY). Fails with KVB_FORMAT, KVB_UNSUPPORTED (unknown dtype, more than
// 8 dimensions, a header over 16 MiB) or KVB_MEMORY; *out is then empty.
kvb_status kvb_safetensors_parse(kvb_safetensors *out, const void *data, size_t size, const char *name, kvb_error *err);

// The key under which a file's metadata hold the SHA-256 of the file itself, computed with those 64 digits as zeros.
// Files without it are accepted: weights, and tables that were written before there was one.
#define KVB_CONTENT_KEY "content_sha256"

// Computes that hash of a whole file in memory, and finds where in the file the digits stand: *place, in bytes from its
// beginning. Returns false if the key is not followed by room for them. Does not allocate.
bool kvb_content_sha256(const void *data, size_t size, size_t *place, char hex[65]);

// Reads a little-endian double at any alignment.
double kvb_load_f64(const unsigned char *p);

// Returns the tensor of that name, or NULL if the file has none.
const kvb_tensor *kvb_safetensors_find(const kvb_safetensors *file, const char *name);

// Returns the value of one entry of a parsed header's `__metadata__`, or NULL if there is none. The header owns it.
const char *kvb_safetensors_metadata(const struct cJSON *header, const char *key);

// Frees what parse allocated; an empty or already freed struct is allowed.
void kvb_safetensors_free(kvb_safetensors *file);

// Refuses files of other kinds (KVB_FORMAT) and those of more than `limit` bytes (KVB_UNSUPPORTED). The message names
// the kind that was found, since operands are easily swapped. `data` may be the first bytes of a file.
kvb_status kvb_file_accept(const unsigned char *data, size_t size, const char *name, size_t limit, kvb_error *err);
// Reads the whole file at `path` into malloc'd memory, which the caller must free even after a failure. Fails as
// kvb_file_accept() does, or with KVB_IO or KVB_MEMORY.
kvb_status kvb_file_read(unsigned char **data, size_t *size, const char *path, size_t limit, kvb_error *err);
