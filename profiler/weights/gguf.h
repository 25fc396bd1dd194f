// GGUF model files (versions 2 and 3, little-endian): metadata and tensors as pointers into the file's bytes.
// Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Knows nothing of attention or text.
// gguf_parse checks everything that the result points at, so the accessors below cannot read outside the buffer. A
// gguf_file is immutable once parsed and may be read by several threads.
#pragma once
#include "formats/file_read.h"
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Bytes of the file, not terminated; may hold anything, NUL included.
typedef struct gguf_string {
    const char *data;
    size_t size;
} gguf_string;

// Type numbers of metadata values as stored in the file: name, number, bytes (0: its length is in the file).
#define GGUF_VALUE_LIST(X) \
    X(U8, 0, 1)            \
    X(I8, 1, 1)            \
    X(U16, 2, 2)           \
    X(I16, 3, 2)           \
    X(U32, 4, 4)           \
    X(I32, 5, 4)           \
    X(F32, 6, 4)           \
    X(BOOL, 7, 1)          \
    X(STRING, 8, 0)        \
    X(ARRAY, 9, 0)         \
    X(U64, 10, 8)          \
    X(I64, 11, 8)          \
    X(F64, 12, 8)

typedef enum gguf_value_type {
#define GGUF_VALUE_ENUM(name, number, size) GGUF_VALUE_##name = number,
    GGUF_VALUE_LIST(GGUF_VALUE_ENUM)
#undef GGUF_VALUE_ENUM
} gguf_value_type;

// Tensor types that can be read: name, number in the file, values per block, bytes per block (ggml's block structs).
// Other numbers are kept in gguf_tensor.type; such tensors have data == NULL and readers refuse them.
#define GGUF_TENSOR_LIST(X) \
    X(F32, 0, 1, 4)         \
    X(F16, 1, 1, 2)         \
    X(Q4_0, 2, 32, 18)      \
    X(Q4_1, 3, 32, 20)      \
    X(Q5_0, 6, 32, 22)      \
    X(Q5_1, 7, 32, 24)      \
    X(Q8_0, 8, 32, 34)      \
    X(Q2_K, 10, 256, 84)    \
    X(Q3_K, 11, 256, 110)   \
    X(Q4_K, 12, 256, 144)   \
    X(Q5_K, 13, 256, 176)   \
    X(Q6_K, 14, 256, 210)   \
    X(IQ4_NL, 20, 32, 18)   \
    X(IQ4_XS, 23, 256, 136) \
    X(BF16, 30, 1, 2)       \
    X(MXFP4, 39, 32, 17)

typedef enum gguf_tensor_type {
#define GGUF_TENSOR_ENUM(name, number, values, bytes) GGUF_TENSOR_##name = number,
    GGUF_TENSOR_LIST(GGUF_TENSOR_ENUM)
#undef GGUF_TENSOR_ENUM
} gguf_tensor_type;

enum { GGUF_MAX_DIMS = 4 };

// Elements as stored: scalars back to back (little-endian, unaligned), each string preceded by its u64 length, each
// array by u32 type and u64 count.
typedef struct gguf_array {
    gguf_value_type type; // of the elements
    uint64_t count;
    const unsigned char *data;
    size_t size; // bytes at data
} gguf_array;

typedef struct gguf_value {
    gguf_string key;
    gguf_value_type type;
    const unsigned char *data; // scalars: the stored bytes; strings: the text; arrays: the first element
    size_t size;               // bytes at data
    gguf_value_type element;   // of an array
    uint64_t count;            // of an array
} gguf_value;

typedef struct gguf_tensor {
    gguf_string name;
    uint32_t type;                // a gguf_tensor_type, or a number that is not known here
    uint32_t n_dims;              // 1..4
    uint64_t dims[GGUF_MAX_DIMS]; // ggml's order: dims[0] is contiguous, a matrix [rows, columns] has {columns, rows}
    uint64_t n_values;            // product of dims; those beyond n_dims are 1
    const void *data;             // NULL when the type is not known
    size_t size;                  // bytes at data
} gguf_tensor;

typedef struct gguf_file {
    char name[256]; // for messages: the path
    uint32_t version;
    uint32_t alignment;
    gguf_value *values; // in file order
    size_t n_values;
    gguf_tensor *tensors; // in file order
    size_t n_tensors;
    uint32_t *value_order;  // indices sorted by key
    uint32_t *tensor_order; // indices sorted by name
    file_view map;          // of gguf_open; zero after gguf_parse
} gguf_file;

// Parses `size` bytes at `data`, which must stay valid and unchanged for as long as *out is used. `name` is for
// messages (copied). Errors: KVB_FORMAT with the byte offset of the first fault, KVB_UNSUPPORTED (version 1,
// big-endian), KVB_VERSION (newer). On failure *out is zero. gguf_close frees; a zero or closed file is allowed.
kvb_status gguf_parse(gguf_file *out, const void *data, size_t size, const char *name, kvb_error *err);
// The same for a file, which stays mapped until gguf_close.
kvb_status gguf_open(gguf_file *out, const char *path, kvb_error *err);
void gguf_close(gguf_file *f);

const gguf_value *gguf_find(const gguf_file *f, const char *key);          // NULL when absent
const gguf_tensor *gguf_tensor_find(const gguf_file *f, const char *name); // NULL when absent

// Typed getters. They fail with KVB_FORMAT, leaving *out unchanged, if the value has another type or is out of range.
// If the key is missing, *out is unchanged too; that is KVB_OK for scalars, so set the default before, and KVB_FORMAT
// for strings and arrays.
kvb_status gguf_get_number(const gguf_file *f, const char *key, double *out, kvb_error *err); // a boolean too; finite
kvb_status gguf_get_u32(const gguf_file *f, const char *key, uint32_t *out, kvb_error *err);  // of any stored type
kvb_status gguf_get_bool(const gguf_file *f, const char *key, bool *out, kvb_error *err);
kvb_status gguf_get_string(const gguf_file *f, const char *key, gguf_string *out, kvb_error *err);
kvb_status gguf_get_array(const gguf_file *f, const char *key, gguf_value_type element, gguf_array *out,
                          kvb_error *err);

// Iterates over an array of strings: takes one string off the front of `rest`, a copy of what gguf_get_array returned.
// Returns false at the end.
bool gguf_next_string(gguf_array *rest, gguf_string *out);
// Returns element i < count of an array of integers; INT64_MIN if the elements are not integers, or if a U64 does not
// fit.
int64_t gguf_array_int(const gguf_array *a, uint64_t i);

bool gguf_string_is(gguf_string s, const char *text);
const char *gguf_value_type_name(uint32_t type); // "u32", "string", ..., or "unknown"
const char *
gguf_tensor_type_name(uint32_t type); // "Q4_K", ..., also for types that cannot be read here; "unknown" for the rest
// Sets *values and *bytes to those of a block. Returns false if the type cannot be read.
bool gguf_tensor_type_block(uint32_t type, uint32_t *values, uint32_t *bytes);

// A model's files: one, or the parts that llama.cpp's gguf-split and the gguf package write, NAME-00001-of-00003.gguf
// and on. Each part says which one it is (split.no, from 0), how many there are (split.count) and how many tensors they
// have together (split.tensors.count); the first one has all other metadata.
typedef struct gguf_set {
    gguf_file *files; // [n] in the order of the parts; metadata is the first one's
    char **paths;     // [n]
    size_t n;
} gguf_set;

// Opens a model from `path`, the whole file or any of its parts, which must be in the same folder. All stay mapped
// until gguf_set_close. Errors: those of gguf_open, and KVB_FORMAT if a part's name does not match its number and
// count, or the parts do not have as many tensors as they state. On failure *out is zero.
kvb_status gguf_set_open(gguf_set *out, const char *path, kvb_error *err);
void gguf_set_close(gguf_set *s); // leaves it zero; a zero one is allowed
