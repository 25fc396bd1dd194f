// The bytes of a safetensors file: what table_write() and rank_write() share. The reader is runtime/safetensors.h.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

// One tensor, row-major; the numbers are the caller's.
typedef struct tensor_entry {
    const char *name;
    const double *f64;
    const uint8_t *u8; // set instead of f64
    int n_dims;
    uint32_t dims[4];
} tensor_entry;

// Elements; the caller has made sure that they fit.
size_t tensor_count(const tensor_entry *t);

// Tensors one after the other in the given order, and metadata, a flat object of strings, to which "content_sha256" is
// added (runtime/safetensors.h): equal content gives equal bytes. Put F64 before U8, so that every tensor is aligned.
// *out is malloc'd and belongs to the caller; NULL on failure. KVB_MEMORY.
kvb_status tensor_file_make(unsigned char **out, size_t *size, const tensor_entry *tensors, size_t n,
                            const cJSON *metadata, kvb_error *err);
