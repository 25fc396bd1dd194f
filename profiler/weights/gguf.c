// The reader of GGUF files: names of types; one pass over a bounded cursor that checks every length before it is used;
// metadata by key with its type checked, tensors by name; models in several files.
#include "profiler/weights/gguf.h"
#include "formats/need.h"
#include "profiler/weights/float_bits.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include <math.h>
#include <stdio.h>
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

// Finds the value or tensor of that name among n, which `order` sorts by name; NULL if there is none. Both structs
// begin with their name.
static const void *find_name(const void *all, size_t each, const uint32_t *order, size_t n, const char *name)
{
    gguf_string wanted = {name, strlen(name)};
    for (size_t low = 0, high = n; low < high;) {
        size_t middle = low + (high - low) / 2;
        const void *one = (const char *)all + each * order[middle];
        int compared = gguf_string_compare(wanted, *(const gguf_string *)one);
        if (compared == 0) return one;
        if (compared < 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

const gguf_value *gguf_find(const gguf_file *f, const char *key)
{
    return find_name(f->values, sizeof *f->values, f->value_order, f->n_values, key);
}

const gguf_tensor *gguf_tensor_find(const gguf_file *f, const char *name)
{
    return find_name(f->tensors, sizeof *f->tensors, f->tensor_order, f->n_tensors, name);
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

// Loads any stored integer as int64. Returns false for other types, and for a u64 beyond int64.
static bool load_integer(gguf_value_type type, const unsigned char *p, int64_t *out)
{
    enum { SIGNED = 1 << GGUF_VALUE_I8 | 1 << GGUF_VALUE_I16 | 1 << GGUF_VALUE_I32 | 1 << GGUF_VALUE_I64 };
    enum { UNSIGNED = 1 << GGUF_VALUE_U8 | 1 << GGUF_VALUE_U16 | 1 << GGUF_VALUE_U32 | 1 << GGUF_VALUE_U64 };
    if (!((SIGNED | UNSIGNED) >> type & 1)) return false;
    size_t size = gguf_value_size(type);
    uint64_t raw = gguf_load(p, size);
    if (SIGNED >> type & 1) *out = (int64_t)(raw << (64 - 8 * size)) >> (64 - 8 * size); // extends the sign
    else *out = raw <= INT64_MAX ? (int64_t)raw : INT64_MAX;
    return SIGNED >> type & 1 || raw <= INT64_MAX;
}

kvb_status gguf_get_number(const gguf_file *f, const char *key, double *out, kvb_error *err)
{
    const gguf_value *v = gguf_find(f, key);
    int64_t whole;
    double x;
    if (!v) return KVB_OK;
    if (v->type == GGUF_VALUE_F32) x = (double)float_of_bits((uint32_t)gguf_load(v->data, 4));
    else if (v->type == GGUF_VALUE_F64) memcpy(&x, v->data, sizeof x);
    else if (v->type == GGUF_VALUE_BOOL && v->data[0] <= 1) x = v->data[0];
    else if (load_integer(v->type, v->data, &whole)) x = (double)whole;
    else return wrong_type(f, v, key, "a number", err);
    if (!isfinite(x)) return kvb_fail(err, KVB_FORMAT, "%s: %s: expected a finite number, found %g", f->name, key, x);
    *out = x;
    return KVB_OK;
}

kvb_status gguf_get_u32(const gguf_file *f, const char *key, uint32_t *out, kvb_error *err)
{
    double x = *out;
    kvb_status status = gguf_get_number(f, key, &x, err);
    if (status == KVB_OK && !(x >= 0 && x <= UINT32_MAX && x == floor(x)))
        return kvb_fail(err, KVB_FORMAT, "%s: %s: expected an integer from 0 to 4294967295, found %.15g", f->name, key,
                        x);
    if (status == KVB_OK) *out = (uint32_t)x;
    return status;
}

kvb_status gguf_get_bool(const gguf_file *f, const char *key, bool *out, kvb_error *err)
{
    const gguf_value *v = gguf_find(f, key);
    if (v && (v->type != GGUF_VALUE_BOOL || v->data[0] > 1)) return wrong_type(f, v, key, "a boolean, 0 or 1", err);
    if (v) *out = v->data[0];
    return KVB_OK;
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
    VALUE_BYTES_MIN = 13,  // key length, empty key, type, one-byte value: bounds the count before anything is allocated
    TENSOR_BYTES_MIN = 32, // name length, dimensions count, one dimension, type, offset
};

// Bytes [at, size) of the file are still to be read. The first error is kept, with the offset at which reading stopped;
// after it all reads return 0.
typedef struct cursor {
    const unsigned char *data;
    size_t size, at;
    const char *name;
    kvb_error *err;
    kvb_status status;
} cursor;

static size_t cursor_left(const cursor *c)
{
    return c->size - c->at;
}

static const unsigned char *cursor_take(cursor *c, uint64_t size, const char *what)
{
    if (c->status != KVB_OK) return NULL;
    if (size > cursor_left(c)) {
        c->status = kvb_fail(
            c->err, KVB_FORMAT,
            "%s: byte %zu: expected %llu more bytes for %s, found %zu; the file is cut short or damaged: get it again",
            c->name, c->at, (unsigned long long)size, what, cursor_left(c));
        return NULL;
    }
    c->at += (size_t)size;
    return c->data + c->at - size;
}

static uint32_t cursor_u32(cursor *c, const char *what)
{
    const unsigned char *p = cursor_take(c, 4, what);
    return p ? (uint32_t)gguf_load(p, 4) : 0;
}

static uint64_t cursor_u64(cursor *c, const char *what)
{
    const unsigned char *p = cursor_take(c, 8, what);
    return p ? gguf_load(p, 8) : 0;
}

static gguf_string cursor_string(cursor *c, const char *what)
{
    uint64_t size = cursor_u64(c, what);
    const unsigned char *p = cursor_take(c, size, what);
    return (gguf_string){(const char *)p, p ? (size_t)size : 0};
}

// Keys and tensor names end up in messages and on terminals, so control characters are refused here once.
static gguf_string cursor_name(cursor *c, const char *what, size_t max)
{
    size_t start = c->at;
    gguf_string s = cursor_string(c, what);
    if (c->status != KVB_OK) return s;
    if (s.size == 0 || s.size > max)
        c->status =
            kvb_fail(c->err, KVB_FORMAT, "%s: byte %zu: expected %s of 1 to %zu bytes, found %zu; the file is damaged",
                     c->name, start, what, max, s.size);
    for (size_t i = 0; c->status == KVB_OK && i < s.size; i++) {
        unsigned char b = (unsigned char)s.data[i];
        if (b < 0x20 || b == 0x7f)
            c->status = kvb_fail(c->err, KVB_FORMAT,
                                 "%s: byte %zu: expected printable text in %s, found byte 0x%02x; the file is damaged",
                                 c->name, start + 8 + i, what, b);
    }
    return s;
}

static gguf_value_type cursor_value_type(cursor *c)
{
    size_t start = c->at;
    uint32_t type = cursor_u32(c, "a value type");
    if (type > GGUF_VALUE_F64)
        c->status = kvb_fail(c->err, KVB_FORMAT,
                             "%s: byte %zu: expected a value type from 0 to %d, found %u; the file is damaged", c->name,
                             start, GGUF_VALUE_F64, type);
    return (gguf_value_type)type;
}

// Reads the header of an array and walks over its elements, so that later readers need no checks of their own.
static void cursor_array(cursor *c, int depth, gguf_value_type *element, uint64_t *count)
{
    *element = cursor_value_type(c);
    *count = cursor_u64(c, "an array's length");
    if (c->status != KVB_OK) return;
    size_t each = gguf_value_size(*element);
    size_t least = each ? each : *element == GGUF_VALUE_STRING ? 8 : 12;
    if (*count > cursor_left(c) / least)
        c->status = kvb_fail(
            c->err, KVB_FORMAT,
            "%s: byte %zu: an array claims %llu elements of type %s, but only %zu bytes follow; the file is damaged",
            c->name, c->at - 8, (unsigned long long)*count, gguf_value_type_name(*element), cursor_left(c));
    else if (*element == GGUF_VALUE_ARRAY && depth == ARRAY_DEPTH_MAX)
        c->status = kvb_fail(c->err, KVB_UNSUPPORTED, "%s: byte %zu: arrays nested deeper than %d", c->name, c->at,
                             ARRAY_DEPTH_MAX);
    if (each) cursor_take(c, *count * each, "an array");
    for (uint64_t i = 0; !each && i < *count && c->status == KVB_OK; i++) {
        gguf_value_type inner;
        uint64_t inner_count;
        if (*element == GGUF_VALUE_STRING) cursor_string(c, "a string in an array");
        else cursor_array(c, depth + 1, &inner, &inner_count);
    }
}

static void parse_value(cursor *c, gguf_value *v)
{
    v->key = cursor_name(c, "a key", KEY_MAX);
    v->type = cursor_value_type(c);
    if (c->status != KVB_OK) return;
    v->size = gguf_value_size(v->type);
    if (v->size) {
        v->data = cursor_take(c, v->size, "a value");
    } else if (v->type == GGUF_VALUE_STRING) {
        gguf_string s = cursor_string(c, "a string");
        v->data = (const unsigned char *)s.data;
        v->size = s.size;
    } else {
        size_t start = c->at + 12; // behind element type and count
        cursor_array(c, 1, &v->element, &v->count);
        v->data = c->data + start;
        v->size = c->at - start;
    }
}

static void parse_shape(cursor *c, gguf_tensor *t)
{
    size_t start = c->at;
    int width = (int)t->name.size;
    t->n_dims = cursor_u32(c, "a tensor's number of dimensions");
    t->n_values = 1;
    for (uint32_t i = 0; i < GGUF_MAX_DIMS; i++) t->dims[i] = 1;
    if (c->status == KVB_OK && (t->n_dims < 1 || t->n_dims > GGUF_MAX_DIMS))
        c->status = kvb_fail(c->err, KVB_FORMAT,
                             "%s: byte %zu: tensor %.*s: expected 1 to %d dimensions, found %u; the file is damaged",
                             c->name, start, width, t->name.data, GGUF_MAX_DIMS, t->n_dims);
    for (uint32_t i = 0; c->status == KVB_OK && i < t->n_dims; i++) {
        t->dims[i] = cursor_u64(c, "a tensor's shape");
        bool fits = t->dims[i] > 0 && !__builtin_mul_overflow(t->n_values, t->dims[i], &t->n_values);
        if (c->status == KVB_OK && (!fits || t->n_values > INT64_MAX))
            c->status = kvb_fail(
                c->err, KVB_FORMAT,
                "%s: byte %zu: tensor %.*s: dimension %u is %llu, which gives no possible size; the file is damaged",
                c->name, c->at - 8, width, t->name.data, i, (unsigned long long)t->dims[i]);
    }
}

// Reads a tensor's entry. Returns the offset of its data in the data section, which starts behind the last tensor's
// entry.
static uint64_t parse_tensor(cursor *c, gguf_tensor *t)
{
    t->name = cursor_name(c, "a tensor name", TENSOR_NAME_MAX);
    parse_shape(c, t);
    size_t start = c->at;
    t->type = cursor_u32(c, "a tensor's type");
    uint64_t offset = cursor_u64(c, "a tensor's offset");
    uint32_t values = 1, bytes = 0;
    if (c->status != KVB_OK || !gguf_tensor_type_block(t->type, &values, &bytes)) return offset;
    int width = (int)t->name.size;
    if (t->dims[0] % values)
        c->status = kvb_fail(c->err, KVB_FORMAT,
                             "%s: byte %zu: tensor %.*s: expected rows of a multiple of %u values for type %s, found "
                             "%llu; the file is damaged",
                             c->name, start, width, t->name.data, values, gguf_tensor_type_name(t->type),
                             (unsigned long long)t->dims[0]);
    else if (__builtin_mul_overflow(t->n_values / values, (uint64_t)bytes, &t->size))
        c->status = kvb_fail(c->err, KVB_FORMAT, "%s: byte %zu: tensor %.*s: its size overflows; the file is damaged",
                             c->name, start, width, t->name.data);
    return offset;
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

typedef struct named_items {
    const void *all;
    size_t each;
} named_items;

static gguf_string name_of(const named_items *items, uint32_t i)
{
    return *(const gguf_string *)((const char *)items->all + items->each * i);
}

static int compare_gguf_names(const void *a, const void *b, void *items)
{
    return gguf_string_compare(name_of(items, *(const uint32_t *)a), name_of(items, *(const uint32_t *)b));
}

// Sorts the indices for the binary search and finds duplicates, which would make the file mean two things at once.
static kvb_status sort_names(const cursor *c, const void *all, size_t each, uint32_t *order, size_t n, const char *what)
{
    named_items items = {all, each};
    for (size_t i = 0; i < n; i++) order[i] = (uint32_t)i;
    qsort_r(order, n, sizeof *order, compare_gguf_names, &items);
    for (size_t i = 1; i < n; i++) {
        gguf_string name = name_of(&items, order[i]);
        if (gguf_string_compare(name_of(&items, order[i - 1]), name) == 0)
            return kvb_fail(c->err, KVB_FORMAT, "%s: the %s %.*s is in the file twice; the file is damaged", c->name,
                            what, (int)(name.size < 100 ? name.size : 100), name.data);
    }
    return KVB_OK;
}

static kvb_status parse_header(cursor *c, gguf_file *f)
{
    const unsigned char *magic = cursor_take(c, 4, "the magic bytes");
    if (magic && memcmp(magic, "GGUF", 4) != 0)
        return kvb_fail(c->err, KVB_FORMAT,
                        "%s: byte 0: expected the magic bytes GGUF, found %s (%02x %02x %02x %02x); a model is a GGUF "
                        "file, or a folder with config.json and safetensors",
                        c->name, kvb_kind_name(kvb_kind_of_file(magic, 4 + cursor_left(c))), magic[0], magic[1],
                        magic[2], magic[3]);
    f->version = cursor_u32(c, "the version");
    if (c->status != KVB_OK) return c->status;
    if (f->version == 1)
        return kvb_fail(
            c->err, KVB_UNSUPPORTED,
            "%s: byte 4: expected GGUF version 2 or 3, found 1; convert the model again with a current tool", c->name);
    if ((f->version & 0xffff) == 0)
        return kvb_fail(c->err, KVB_UNSUPPORTED, "%s: byte 4: a big-endian GGUF file; convert it to little-endian",
                        c->name);
    if (f->version != 2 && f->version != 3)
        return kvb_fail(c->err, KVB_VERSION, "%s: byte 4: expected GGUF version 2 or 3, found %u", c->name, f->version);

    uint64_t n_tensors = cursor_u64(c, "the number of tensors"),
             n_values = cursor_u64(c, "the number of metadata entries");
    if (c->status != KVB_OK) return c->status;
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
    f->alignment = DEFAULT_ALIGNMENT;
    kvb_status status = gguf_get_u32(f, "general.alignment", &f->alignment, err);
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
    for (size_t i = 0; i < f->n_values && c->status == KVB_OK; i++) parse_value(c, &f->values[i]);
    for (size_t i = 0; i < f->n_tensors && c->status == KVB_OK; i++) (*offsets)[i] = parse_tensor(c, &f->tensors[i]);
    status = c->status;
    if (status == KVB_OK) status = sort_names(c, f->values, sizeof *f->values, f->value_order, f->n_values, "key");
    if (status == KVB_OK)
        status = sort_names(c, f->tensors, sizeof *f->tensors, f->tensor_order, f->n_tensors, "tensor");
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
    size_t length = strlen(name), keep = sizeof out->name - 1; // the end of a long path says more than its start
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
    free_all(f->values, f->tensors, f->value_order, f->tensor_order);
    file_unmap(&f->map);
    *f = (gguf_file){0};
}

// ---- A model in one file, or in parts ----

// What a part of a split model states: its number, the number of parts, and the tensors in all of them.
typedef struct gguf_part {
    uint32_t no, count, n_tensors;
} gguf_part;

// Reads what a file states of its part; count is 1 for a whole model (gguf-split writes 0 into merged ones).
static kvb_status read_part(gguf_part *out, const gguf_file *f, kvb_error *err)
{
    *out = (gguf_part){UINT32_MAX, 1, 0};
    kvb_status status = gguf_get_u32(f, "split.count", &out->count, err);
    if (status != KVB_OK || out->count <= 1) {
        out->count = 1;
        return status;
    }
    status = gguf_get_u32(f, "split.no", &out->no, err);
    if (status == KVB_OK) status = gguf_get_u32(f, "split.tensors.count", &out->n_tensors, err);
    if (status == KVB_OK && (out->no >= out->count || out->count > UINT16_MAX))
        return kvb_fail(err, KVB_FORMAT, "%s: split.no %u of split.count %u is no possible part; the file is damaged",
                        f->name, out->no, out->count);
    return status;
}

// Writes the end of a part's name. Returns its length.
static size_t name_end(char out[40], uint32_t no, uint32_t count)
{
    return (size_t)snprintf(out, 40, "-%05u-of-%05u.gguf", no + 1, count);
}

// Derives the names of all parts from that of one of them.
static kvb_status name_parts(gguf_set *s, const char *path, const gguf_part *own, kvb_error *err)
{
    char end[40];
    size_t size = strlen(path), n_end = name_end(end, own->no, own->count);
    if (size < n_end || strcmp(path + size - n_end, end) != 0)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: is part %u of %u of a model, expected a name that ends with %s: the others are found by "
                        "it; give the parts the names that they had",
                        path, own->no + 1, own->count, end);
    s->files = need(own->count, sizeof *s->files, "parts of a model");
    s->paths = need(own->count, sizeof *s->paths, "parts of a model");
    for (; s->n < own->count; s->n++) {
        name_end(end, (uint32_t)s->n, own->count);
        s->paths[s->n] = need_text("%.*s%s", (int)(size - n_end), path, end);
    }
    return KVB_OK;
}

static kvb_status open_part(gguf_file *out, const char *path, uint32_t no, const gguf_part *own, kvb_error *err)
{
    gguf_part found;
    kvb_error inner = {0};
    kvb_status status = gguf_open(out, path, &inner);
    if (status != KVB_OK)
        return kvb_fail(err, status, "%.400s (part %u of %u of the model)", inner.message, no + 1, own->count);
    status = read_part(&found, out, err);
    if (status != KVB_OK) return status;
    if (found.no != no || found.count != own->count)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: expected part %u of %u, found part %u of %u; it is of another model, or has another "
                        "part's name: get it again",
                        path, no + 1, own->count, found.no + 1, found.count);
    if (found.n_tensors != own->n_tensors)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: split.tensors.count: expected %u tensors in all parts, as the part that was opened says, "
                        "found %u; it is of another model: get it again",
                        path, own->n_tensors, found.n_tensors);
    return KVB_OK;
}

static kvb_status open_parts(gguf_set *s, const char *path, const gguf_part *own, kvb_error *err)
{
    size_t n_tensors = 0;
    kvb_status status = name_parts(s, path, own, err);
    for (uint32_t i = 0; status == KVB_OK && i < own->count; i++) {
        status = open_part(&s->files[i], s->paths[i], i, own, err);
        n_tensors += s->files[i].n_tensors;
    }
    if (status == KVB_OK && n_tensors != own->n_tensors)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: split.tensors.count: expected %u tensors in all %u parts, found %zu; get the parts again",
                        s->paths[0], own->n_tensors, own->count, n_tensors);
    return status;
}

static void keep_one(gguf_set *s, const char *path, gguf_file *file)
{
    *s = (gguf_set){need_copy(file, 1, sizeof *file, "models"), need(1, sizeof *s->paths, "models"), 1};
    s->paths[0] = need_text("%s", path);
    *file = (gguf_file){0};
}

kvb_status gguf_set_open(gguf_set *out, const char *path, kvb_error *err)
{
    gguf_part own;
    gguf_file file;
    *out = (gguf_set){0};
    kvb_status status = gguf_open(&file, path, err);
    if (status == KVB_OK) status = read_part(&own, &file, err);
    if (status == KVB_OK && own.count > 1) status = open_parts(out, path, &own, err);
    else if (status == KVB_OK) keep_one(out, path, &file);
    gguf_close(&file);
    if (status != KVB_OK) gguf_set_close(out);
    return status;
}

void gguf_set_close(gguf_set *s)
{
    for (size_t i = 0; i < s->n; i++) {
        gguf_close(&s->files[i]);
        free(s->paths[i]);
    }
    free_all(s->files, s->paths);
    *s = (gguf_set){0};
}
