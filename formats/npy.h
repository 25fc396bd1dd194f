// NumPy's .npy: little-endian float32, float64, int32, int64, C order.
#pragma once
#include "runtime/kvbudget.h"
#include <stddef.h>
#include <stdint.h>

#define NPY_MAX_DIMS 8

typedef enum npy_type { NPY_F32, NPY_F64, NPY_I32, NPY_I64 } npy_type;

size_t npy_type_size(npy_type type);

typedef struct npy_array {
    npy_type type;
    uint32_t n_dims; // 0: a single number
    uint64_t shape[NPY_MAX_DIMS];
    size_t count;     // product of the shape
    const void *data; // count elements, inside the parsed buffer, perhaps unaligned: use the npy_to_ functions
} npy_array;

// Parses header versions 1, 2 and 3 in the caller's buffer, which must outlive *out. Too many bytes are refused as well
// as too few. Errors: KVB_FORMAT (damaged, truncated), KVB_VERSION, KVB_UNSUPPORTED (Fortran order, other element
// types).
kvb_status npy_parse(npy_array *out, const void *data, size_t size, const char *name, kvb_error *err);

// Copies all elements. To float: from <f4, and from <f8 rounded. To double: from all types (int64 beyond 2^53 is
// KVB_NUMERIC). To int32: from <i4 and <i8, out of range is KVB_NUMERIC. Any other conversion fails with
// KVB_UNSUPPORTED. `name` is used in messages.
kvb_status npy_to_f32(const npy_array *a, float *out, const char *name, kvb_error *err);
kvb_status npy_to_f64(const npy_array *a, double *out, const char *name, kvb_error *err);
kvb_status npy_to_i32(const npy_array *a, int32_t *out, const char *name, kvb_error *err);

// Writes version 1.0, C order, data at a multiple of 64 bytes (as NumPy itself does), atomically. Equal content gives
// equal bytes.
kvb_status npy_write(const char *path, npy_type type, uint32_t n_dims, const uint64_t *shape, const void *data,
                     kvb_error *err);
