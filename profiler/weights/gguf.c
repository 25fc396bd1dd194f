// The reader of GGUF files: names of types; one pass over a bounded cursor that checks every length before it is used;
// metadata by key with its type checked, tensors by name.
#include "profiler/weights/gguf.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t gguf_load(const unsigned char *p, size_t bytes)
{
    uint64_t v = 0;
    for (size_t i = bytes; i-- > 0;) v = v << 8 | p[i];
    return v;
}

static size_t gguf_value_size(uint32_t type)
{
    switch (type) {
#define VALUE_SIZE(name, number, size) \
    case number:                       \
        return size;
        GGUF_VALUE_LIST(VALUE_SIZE)
#undef VALUE_SIZE
    }
    return 0;
}

const char *gguf_value_type_name(uint32_t type)
{
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    return type < sizeof names / sizeof names[0] ? names[type] : "unknown";
}

const char *gguf_tensor_type_name(uint32_t type)
{
    // The numbers of ggml's enum ggml_type; empty ones were removed there.
    static const char *const names[] = {"F32",     "F16",    "Q4_0",    "Q4_1",  "",       "",      "Q5_0",  "Q5_1",
                                        "Q8_0",    "Q8_1",   "Q2_K",    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K",  "Q8_K",
                                        "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS",
                                        "I8",      "I16",    "I32",     "I64",   "F64",    "IQ1_M", "BF16",  "",
                                        "",        "",       "TQ1_0",   "TQ2_0", "",       "",      "",      "MXFP4"};
    return type < sizeof names / sizeof names[0] && names[type][0] ? names[type] : "unknown";
}

bool gguf_tensor_type_block(uint32_t type, uint32_t *values, uint32_t *bytes)
{
    switch (type) {
#define TENSOR_BLOCK(name, number, block_values, block_bytes) \
    case number:                                              \
        *values = block_values, *bytes = block_bytes;         \
        return true;
        GGUF_TENSOR_LIST(TENSOR_BLOCK)
#undef TENSOR_BLOCK
    }
    return false;
}

static int gguf_string_compare(gguf_string a, gguf_string b)
{
    size_t common = a.size < b.size ? a.size : b.size;
    int order = common ? memcmp(a.data, b.data, common) : 0;
    return order ? order : (a.size > b.size) - (a.size < b.size);
}

const gguf_value *gguf_find(const gguf_file *f, const char *key)
{
    gguf_string wanted = {key, strlen(key)};
    for (size_t low = 0, high = f->n_values; low < high;) {
        size_t middle = low + (high - low) / 2;
        const gguf_value *v = &f->values[f->value_order[middle]];
        int order = gguf_string_compare(wanted, v->key);
        if (order == 0) return v;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

const gguf_tensor *gguf_tensor_find(const gguf_file *f, const char *name)
{
    gguf_string wanted = {name, strlen(name)};
    for (size_t low = 0, high = f->n_tensors; low < high;) {
        size_t middle = low + (high - low) / 2;
        const gguf_tensor *t = &f->tensors[f->tensor_order[middle]];
        int order = gguf_string_compare(wanted, t->name);
        if (order == 0) return t;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

bool gguf_string_is(gguf_string s, const char *text)
{
    return s.size == strlen(text) && memcmp(s.data, text, s.size) == 0;
}

// ---- typed getters ----

static kvb_status find_required(const gguf_file *f, const char *key, const gguf_value **out, kvb_error *err)
{
    *out = gguf_find(f, key);
    if (*out) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT,
                    "%s: the metadata lacks %s, which this model needs; convert the model again with a current tool",
                    f->name, key);
}

static kvb_status wrong_type(const gguf_file *f, const gguf_value *v, const char *key, const char *expected,
                             kvb_error *err)
{
    bool array = v->type == GGUF_VALUE_ARRAY;
    return kvb_fail(err, KVB_FORMAT, "%s: %s: expected %s, found %s%s", f->name, key, expected,
                    array ? "an array of " : "a value of type ", gguf_value_type_name(array ? v->element : v->type));
}

// Any stored integer as int64; false for other types and for u64 beyond int64.
static bool load_integer(gguf_value_type type, const unsigned char *p, int64_t *out)
{
    size_t size = gguf_value_size(type);
    uint64_t raw = size && type != GGUF_VALUE_F64 ? gguf_load(p, size) : 0;
    switch (type) {
    case GGUF_VALUE_U8:
    case GGUF_VALUE_U16:
    case GGUF_VALUE_U32:
        *out = (int64_t)raw;
        return true;
    case GGUF_VALUE_I8:
        *out = (int8_t)raw;
        return true;
    case GGUF_VALUE_I16:
        *out = (int16_t)raw;
        return true;
    case GGUF_VALUE_I32:
        *out = (int32_t)raw;
        return true;
    case GGUF_VALUE_I64:
        *out = (int64_t)raw;
        return true;
    case GGUF_VALUE_U64:
        *out = raw <= INT64_MAX ? (int64_t)raw : INT64_MAX;
        return raw <= INT64_MAX;
    default:
        return false;
    }
}

static kvb_status value_u32(const gguf_file *f, const gguf_value *v, const char *key, uint32_t *out, kvb_error *err)
{
    int64_t n = -1;
    bool integer = load_integer(v->type, v->data, &n);
    if (!integer && v->type != GGUF_VALUE_U64) return wrong_type(f, v, key, "an integer", err);
    if (!integer || n < 0 || n > UINT32_MAX)
        return kvb_fail(err, KVB_FORMAT, "%s: %s: expected an integer from 0 to 4294967295, found %lld", f->name, key,
                        (long long)n);
    *out = (uint32_t)n;
    return KVB_OK;
}

static kvb_status value_f32(const gguf_file *f, const gguf_value *v, const char *key, float *out, kvb_error *err)
{
    float x;
    if (v->type == GGUF_VALUE_F32) {
        uint32_t bits = (uint32_t)gguf_load(v->data, 4);
        memcpy(&x, &bits, sizeof x);
    } else if (v->type == GGUF_VALUE_F64) {
        uint64_t bits = gguf_load(v->data, 8);
        double wide;
        memcpy(&wide, &bits, sizeof wide);
        x = fabs(wide) <= 3.4028234663852886e38 ? (float)wide
                                                : INFINITY; // beyond float the conversion would be undefined
    } else {
        return wrong_type(f, v, key, "a floating-point number", err);
    }
    if (!isfinite(x))
        return kvb_fail(err, KVB_FORMAT, "%s: %s: expected a finite number, found %g", f->name, key, (double)x);
    *out = x;
    return KVB_OK;
}

static kvb_status value_bool(const gguf_file *f, const gguf_value *v, const char *key, bool *out, kvb_error *err)
{
    if (v->type != GGUF_VALUE_BOOL) return wrong_type(f, v, key, "a boolean", err);
    if (v->data[0] > 1)
        return kvb_fail(err, KVB_FORMAT, "%s: %s: expected a boolean stored as 0 or 1, found %u", f->name, key,
                        v->data[0]);
    *out = v->data[0] == 1;
    return KVB_OK;
}

kvb_status gguf_get_u32(const gguf_file *f, const char *key, uint32_t *out, kvb_error *err)
{
    const gguf_value *v;
    kvb_status status = find_required(f, key, &v, err);
    return status == KVB_OK ? value_u32(f, v, key, out, err) : status;
}

kvb_status gguf_get_f32(const gguf_file *f, const char *key, float *out, kvb_error *err)
{
    const gguf_value *v;
    kvb_status status = find_required(f, key, &v, err);
    return status == KVB_OK ? value_f32(f, v, key, out, err) : status;
}

kvb_status gguf_get_bool(const gguf_file *f, const char *key, bool *out, kvb_error *err)
{
    const gguf_value *v;
    kvb_status status = find_required(f, key, &v, err);
    return status == KVB_OK ? value_bool(f, v, key, out, err) : status;
}

kvb_status gguf_get_string(const gguf_file *f, const char *key, gguf_string *out, kvb_error *err)
{
    const gguf_value *v;
    kvb_status status = find_required(f, key, &v, err);
    if (status != KVB_OK) return status;
    if (v->type != GGUF_VALUE_STRING) return wrong_type(f, v, key, "a string", err);
    *out = (gguf_string){(const char *)v->data, v->size};
    return KVB_OK;
}

kvb_status gguf_get_array(const gguf_file *f, const char *key, gguf_value_type element, gguf_array *out, kvb_error *err)
{
    const gguf_value *v;
    kvb_status status = find_required(f, key, &v, err);
    if (status != KVB_OK) return status;
    if (v->type != GGUF_VALUE_ARRAY || v->element != element) {
        char expected[40];
        strcat(strcpy(expected, "an array of "), gguf_value_type_name(element));
        return wrong_type(f, v, key, expected, err);
    }
    *out = (gguf_array){v->element, v->count, v->data, v->size};
    return KVB_OK;
}

kvb_status gguf_get_u32_or(const gguf_file *f, const char *key, uint32_t missing, uint32_t *out, kvb_error *err)
{
    const gguf_value *v = gguf_find(f, key);
    if (v) return value_u32(f, v, key, out, err);
    *out = missing;
    return KVB_OK;
}

kvb_status gguf_get_f32_or(const gguf_file *f, const char *key, float missing, float *out, kvb_error *err)
{
    const gguf_value *v = gguf_find(f, key);
    if (v) return value_f32(f, v, key, out, err);
    *out = missing;
    return KVB_OK;
}

kvb_status gguf_get_bool_or(const gguf_file *f, const char *key, bool missing, bool *out, kvb_error *err)
{
    const gguf_value *v = gguf_find(f, key);
    if (v) return value_bool(f, v, key, out, err);
    *out = missing;
    return KVB_OK;
}

bool gguf_next_string(gguf_array *rest, gguf_string *out)
{
    if (rest->type != GGUF_VALUE_STRING || rest->count == 0) return false;
    size_t size = (size_t)gguf_load(rest->data, 8); // fits: gguf_parse walked over it
    *out = (gguf_string){(const char *)rest->data + 8, size};
    rest->data += 8 + size;
    rest->size -= 8 + size;
    rest->count--;
    return true;
}

int64_t gguf_array_int(const gguf_array *a, uint64_t i)
{
    int64_t n;
    return load_integer(a->type, a->data + i * gguf_value_size(a->type), &n) ? n : INT64_MIN;
}

// ---- The parser ----

enum {
    KEY_MAX = 65535,      // the format's limit for metadata keys
    TENSOR_NAME_MAX = 64, // the format's limit, and ggml's
    ARRAY_DEPTH_MAX = 4,  // arrays of arrays are rare and never deep; the limit bounds the recursion
    DEFAULT_ALIGNMENT = 32,
    VALUE_BYTES_MIN =
        13, // key length, one-byte key absent, type, one-byte value: bounds the count before anything is allocated
    TENSOR_BYTES_MIN = 32, // name length, dimensions count, one dimension, type, offset
};

// Bytes [at, size) of the file are still to be read. Errors give the offset at which reading stopped.
typedef struct cursor {
    const unsigned char *data;
    size_t size, at;
    const char *name;
    kvb_error *err;
} cursor;

static size_t cursor_left(const cursor *c)
{
    return c->size - c->at;
}

static kvb_status cursor_short(const cursor *c, uint64_t wanted, const char *what)
{
    return kvb_fail(
        c->err, KVB_FORMAT,
        "%s: byte %zu: expected %llu more bytes for %s, found %zu; the file is cut short or damaged: get it again",
        c->name, c->at, (unsigned long long)wanted, what, cursor_left(c));
}

static kvb_status cursor_take(cursor *c, uint64_t size, const char *what, const unsigned char **out)
{
    if (size > cursor_left(c)) return cursor_short(c, size, what);
    *out = c->data + c->at;
    c->at += (size_t)size;
    return KVB_OK;
}

static kvb_status cursor_u32(cursor *c, const char *what, uint32_t *out)
{
    const unsigned char *p = NULL;
    kvb_status status = cursor_take(c, 4, what, &p);
    if (status == KVB_OK) *out = (uint32_t)gguf_load(p, 4);
    return status;
}

static kvb_status cursor_u64(cursor *c, const char *what, uint64_t *out)
{
    const unsigned char *p = NULL;
    kvb_status status = cursor_take(c, 8, what, &p);
    if (status == KVB_OK) *out = gguf_load(p, 8);
    return status;
}

static kvb_status cursor_string(cursor *c, const char *what, gguf_string *out)
{
    uint64_t size = 0;
    const unsigned char *p = NULL;
    kvb_status status = cursor_u64(c, what, &size);
    if (status == KVB_OK) status = cursor_take(c, size, what, &p);
    if (status == KVB_OK) *out = (gguf_string){(const char *)p, (size_t)size};
    return status;
}

// Keys and tensor names end up in messages and on terminals, so control characters are refused here once.
static kvb_status cursor_name(cursor *c, const char *what, size_t max, gguf_string *out)
{
    size_t start = c->at;
    kvb_status status = cursor_string(c, what, out);
    if (status != KVB_OK) return status;
    if (out->size == 0 || out->size > max)
        return kvb_fail(c->err, KVB_FORMAT,
                        "%s: byte %zu: expected %s of 1 to %zu bytes, found %zu; the file is damaged", c->name, start,
                        what, max, out->size);
    for (size_t i = 0; i < out->size; i++) {
        unsigned char b = (unsigned char)out->data[i];
        if (b < 0x20 || b == 0x7f)
            return kvb_fail(c->err, KVB_FORMAT,
                            "%s: byte %zu: expected printable text in %s, found byte 0x%02x; the file is damaged",
                            c->name, start + 8 + i, what, b);
    }
    return KVB_OK;
}

static kvb_status cursor_value_type(cursor *c, gguf_value_type *out)
{
    size_t start = c->at;
    uint32_t type = 0;
    kvb_status status = cursor_u32(c, "a value type", &type);
    if (status != KVB_OK) return status;
    if (type > GGUF_VALUE_F64)
        return kvb_fail(c->err, KVB_FORMAT,
                        "%s: byte %zu: expected a value type from 0 to %d, found %u; the file is damaged", c->name,
                        start, GGUF_VALUE_F64, type);
    *out = (gguf_value_type)type;
    return KVB_OK;
}

// Reads the header of an array and walks over its elements, so that later readers need no checks of their own.
static kvb_status cursor_array(cursor *c, int depth, gguf_value_type *element, uint64_t *count)
{
    kvb_status status = cursor_value_type(c, element);
    if (status == KVB_OK) status = cursor_u64(c, "an array's length", count);
    if (status != KVB_OK) return status;

    size_t each = gguf_value_size(*element);
    size_t least = each ? each : *element == GGUF_VALUE_STRING ? 8 : 12;
    if (*count > cursor_left(c) / least)
        return kvb_fail(
            c->err, KVB_FORMAT,
            "%s: byte %zu: an array claims %llu elements of type %s, but only %zu bytes follow; the file is damaged",
            c->name, c->at - 8, (unsigned long long)*count, gguf_value_type_name(*element), cursor_left(c));
    if (each) {
        c->at += (size_t)*count * each;
        return KVB_OK;
    }
    if (*element == GGUF_VALUE_ARRAY && depth == ARRAY_DEPTH_MAX)
        return kvb_fail(c->err, KVB_UNSUPPORTED, "%s: byte %zu: arrays nested deeper than %d", c->name, c->at,
                        ARRAY_DEPTH_MAX);
    for (uint64_t i = 0; i < *count && status == KVB_OK; i++) {
        gguf_string s;
        gguf_value_type inner;
        uint64_t inner_count;
        if (*element == GGUF_VALUE_STRING) status = cursor_string(c, "a string in an array", &s);
        else status = cursor_array(c, depth + 1, &inner, &inner_count);
    }
    return status;
}

static kvb_status parse_value(cursor *c, gguf_value *v)
{
    kvb_status status = cursor_name(c, "a key", KEY_MAX, &v->key);
    if (status == KVB_OK) status = cursor_value_type(c, &v->type);
    if (status != KVB_OK) return status;
    size_t each = gguf_value_size(v->type);
    if (each) {
        v->size = each;
        return cursor_take(c, each, "a value", &v->data);
    }
    if (v->type == GGUF_VALUE_STRING) {
        gguf_string s = {0};
        status = cursor_string(c, "a string", &s);
        v->data = (const unsigned char *)s.data;
        v->size = s.size;
        return status;
    }
    size_t start = c->at + 12; // behind element type and count
    status = cursor_array(c, 1, &v->element, &v->count);
    if (status != KVB_OK) return status;
    v->data = c->data + start;
    v->size = c->at - start;
    return KVB_OK;
}

// Everything of a tensor but its place: `offset` counts from the data section, which starts behind the last tensor's
// entry.
static kvb_status parse_tensor(cursor *c, gguf_tensor *t, uint64_t *offset)
{
    kvb_status status = cursor_name(c, "a tensor name", TENSOR_NAME_MAX, &t->name);
    size_t start = c->at;
    if (status == KVB_OK) status = cursor_u32(c, "a tensor's number of dimensions", &t->n_dims);
    if (status != KVB_OK) return status;
    int width = (int)t->name.size;
    if (t->n_dims < 1 || t->n_dims > GGUF_MAX_DIMS)
        return kvb_fail(c->err, KVB_FORMAT,
                        "%s: byte %zu: tensor %.*s: expected 1 to %d dimensions, found %u; the file is damaged",
                        c->name, start, width, t->name.data, GGUF_MAX_DIMS, t->n_dims);

    t->n_values = 1;
    for (uint32_t i = 0; i < GGUF_MAX_DIMS; i++) t->dims[i] = 1;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        status = cursor_u64(c, "a tensor's shape", &t->dims[i]);
        if (status != KVB_OK) return status;
        if (t->dims[i] == 0 || __builtin_mul_overflow(t->n_values, t->dims[i], &t->n_values) || t->n_values > INT64_MAX)
            return kvb_fail(
                c->err, KVB_FORMAT,
                "%s: byte %zu: tensor %.*s: dimension %u is %llu, which gives no possible size; the file is damaged",
                c->name, c->at - 8, width, t->name.data, i, (unsigned long long)t->dims[i]);
    }
    start = c->at;
    status = cursor_u32(c, "a tensor's type", &t->type);
    if (status == KVB_OK) status = cursor_u64(c, "a tensor's offset", offset);
    if (status != KVB_OK) return status;

    uint32_t values = 1, bytes = 0;
    if (!gguf_tensor_type_block(t->type, &values, &bytes)) return KVB_OK;
    if (t->dims[0] % values)
        return kvb_fail(c->err, KVB_FORMAT,
                        "%s: byte %zu: tensor %.*s: expected rows of a multiple of %u values for type %s, found %llu; "
                        "the file is damaged",
                        c->name, start, width, t->name.data, values, gguf_tensor_type_name(t->type),
                        (unsigned long long)t->dims[0]);
    if (__builtin_mul_overflow(t->n_values / values, (uint64_t)bytes, &t->size))
        return kvb_fail(c->err, KVB_FORMAT, "%s: byte %zu: tensor %.*s: its size overflows; the file is damaged",
                        c->name, start, width, t->name.data);
    return KVB_OK;
}

static kvb_status place_tensor(const cursor *c, const gguf_file *f, size_t data_start, gguf_tensor *t, uint64_t offset)
{
    int width = (int)t->name.size;
    if (offset % f->alignment)
        return kvb_fail(c->err, KVB_FORMAT,
                        "%s: tensor %.*s: expected an offset that is a multiple of %u, found %llu; the file is damaged",
                        c->name, width, t->name.data, f->alignment, (unsigned long long)offset);
    size_t room = c->size > data_start ? c->size - data_start : 0;
    if (offset > room || t->size > room - offset)
        return kvb_fail(c->err, KVB_FORMAT,
                        "%s: tensor %.*s: expected %zu bytes at byte %zu + %llu, but the file ends at %zu; it is cut "
                        "short: get it again",
                        c->name, width, t->name.data, t->size, data_start, (unsigned long long)offset, c->size);
    uint32_t values, bytes;
    if (gguf_tensor_type_block(t->type, &values, &bytes)) t->data = c->data + data_start + offset;
    return KVB_OK;
}

static int value_order_compare(const void *a, const void *b, void *file)
{
    const gguf_file *f = file;
    return gguf_string_compare(f->values[*(const uint32_t *)a].key, f->values[*(const uint32_t *)b].key);
}

static int tensor_order_compare(const void *a, const void *b, void *file)
{
    const gguf_file *f = file;
    return gguf_string_compare(f->tensors[*(const uint32_t *)a].name, f->tensors[*(const uint32_t *)b].name);
}

// Sorts the indices for the binary search and finds duplicates, which would make the file mean two things at once.
static kvb_status sort_names(gguf_file *f, kvb_error *err)
{
    for (size_t i = 0; i < f->n_values; i++) f->value_order[i] = (uint32_t)i;
    for (size_t i = 0; i < f->n_tensors; i++) f->tensor_order[i] = (uint32_t)i;
    qsort_r(f->value_order, f->n_values, sizeof *f->value_order, value_order_compare, f);
    qsort_r(f->tensor_order, f->n_tensors, sizeof *f->tensor_order, tensor_order_compare, f);
    for (size_t i = 1; i < f->n_values; i++) {
        gguf_string key = f->values[f->value_order[i]].key;
        if (gguf_string_compare(f->values[f->value_order[i - 1]].key, key) == 0)
            return kvb_fail(err, KVB_FORMAT, "%s: the key %.*s stands in the file twice; the file is damaged", f->name,
                            (int)(key.size < 100 ? key.size : 100), key.data);
    }
    for (size_t i = 1; i < f->n_tensors; i++) {
        gguf_string name = f->tensors[f->tensor_order[i]].name;
        if (gguf_string_compare(f->tensors[f->tensor_order[i - 1]].name, name) == 0)
            return kvb_fail(err, KVB_FORMAT, "%s: the tensor %.*s stands in the file twice; the file is damaged",
                            f->name, (int)name.size, name.data);
    }
    return KVB_OK;
}

static kvb_status parse_header(cursor *c, gguf_file *f)
{
    const unsigned char *magic = NULL;
    kvb_status status = cursor_take(c, 4, "the magic bytes", &magic);
    if (status != KVB_OK) return status;
    if (memcmp(magic, "GGUF", 4) != 0) {
        return kvb_fail(c->err, KVB_FORMAT,
                        "%s: byte 0: expected the magic bytes GGUF, found %s (%02x %02x %02x %02x); a model is a GGUF "
                        "file, or a folder with config.json and safetensors",
                        c->name, kvb_kind_name(kvb_kind_of_file(magic, 4 + cursor_left(c))), magic[0], magic[1],
                        magic[2], magic[3]);
    }
    status = cursor_u32(c, "the version", &f->version);
    if (status != KVB_OK) return status;
    if (f->version == 1)
        return kvb_fail(
            c->err, KVB_UNSUPPORTED,
            "%s: byte 4: expected GGUF version 2 or 3, found 1; convert the model again with a current tool", c->name);
    if ((f->version & 0xffff) == 0)
        return kvb_fail(c->err, KVB_UNSUPPORTED, "%s: byte 4: a big-endian GGUF file; convert it to little-endian",
                        c->name);
    if (f->version != 2 && f->version != 3)
        return kvb_fail(c->err, KVB_VERSION, "%s: byte 4: expected GGUF version 2 or 3, found %u", c->name, f->version);

    uint64_t n_tensors = 0, n_values = 0;
    status = cursor_u64(c, "the number of tensors", &n_tensors);
    if (status == KVB_OK) status = cursor_u64(c, "the number of metadata entries", &n_values);
    if (status != KVB_OK) return status;
    // Counts are bounded by what the file could hold, so that no absurd count becomes an allocation.
    if (n_tensors > cursor_left(c) / TENSOR_BYTES_MIN || n_values > cursor_left(c) / VALUE_BYTES_MIN ||
        n_tensors > UINT32_MAX || n_values > UINT32_MAX)
        return kvb_fail(c->err, KVB_FORMAT,
                        "%s: byte 8: the header claims %llu tensors and %llu metadata entries, more than %zu bytes can "
                        "hold; the file is damaged or cut short",
                        c->name, (unsigned long long)n_tensors, (unsigned long long)n_values, c->size);
    f->n_tensors = (size_t)n_tensors;
    f->n_values = (size_t)n_values;
    return KVB_OK;
}

static kvb_status parse_alignment(gguf_file *f, kvb_error *err)
{
    kvb_status status = gguf_get_u32_or(f, "general.alignment", DEFAULT_ALIGNMENT, &f->alignment, err);
    if (status == KVB_OK && (f->alignment == 0 || f->alignment & (f->alignment - 1)))
        return kvb_fail(err, KVB_FORMAT,
                        "%s: general.alignment: expected a power of two, found %u; the file is damaged", f->name,
                        f->alignment);
    return status;
}

static kvb_status parse_all(cursor *c, gguf_file *f, uint64_t **offsets)
{
    kvb_status status = parse_header(c, f);
    if (status != KVB_OK) return status;
    f->values = need(f->n_values, sizeof *f->values, "metadata entries");
    f->tensors = need(f->n_tensors, sizeof *f->tensors, "tensors");
    f->value_order = need(f->n_values, sizeof *f->value_order, "metadata entries");
    f->tensor_order = need(f->n_tensors, sizeof *f->tensor_order, "tensors");
    *offsets = need(f->n_tensors, sizeof **offsets, "tensors");
    for (size_t i = 0; i < f->n_values && status == KVB_OK; i++) status = parse_value(c, &f->values[i]);
    for (size_t i = 0; i < f->n_tensors && status == KVB_OK; i++)
        status = parse_tensor(c, &f->tensors[i], &(*offsets)[i]);
    if (status == KVB_OK) status = sort_names(f, c->err);
    if (status == KVB_OK) status = parse_alignment(f, c->err);
    if (status != KVB_OK) return status;

    size_t padding =
        (f->alignment - c->at % f->alignment) % f->alignment; // c->at is far below SIZE_MAX: it indexes memory
    for (size_t i = 0; i < f->n_tensors && status == KVB_OK; i++)
        status = place_tensor(c, f, c->at + padding, &f->tensors[i], (*offsets)[i]);
    return status;
}

kvb_status gguf_parse(gguf_file *out, const void *data, size_t size, const char *name, kvb_error *err)
{
    *out = (gguf_file){0};
    size_t length = strlen(name), keep = sizeof out->name - 1; // of a long path the end says more than the start
    strcpy(out->name, length > keep ? name + (length - keep) : name);
    cursor c = {.data = data, .size = size, .name = out->name, .err = err};
    uint64_t *offsets = NULL;
    kvb_status status = parse_all(&c, out, &offsets);
    free(offsets);
    if (status != KVB_OK) gguf_close(out);
    return status;
}

kvb_status gguf_open(gguf_file *out, const char *path, kvb_error *err)
{
    file_view map;
    *out = (gguf_file){0};
    kvb_status status = file_map(&map, path, err);
    if (status != KVB_OK) return status;
    status = gguf_parse(out, map.data, map.size, path, err);
    if (status == KVB_OK) out->map = map;
    else file_unmap(&map);
    return status;
}

void gguf_close(gguf_file *f)
{
    if (!f) return;
    free(f->values);
    free(f->tensors);
    free(f->value_order);
    free(f->tensor_order);
    file_unmap(&f->map);
    *f = (gguf_file){0};
}
