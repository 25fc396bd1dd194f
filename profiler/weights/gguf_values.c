// What was parsed of a GGUF file: names of types, metadata by key with its type checked, tensors by name.
#include "profiler/weights/gguf_parts.h"
#include "runtime/fail.h"
#include <math.h>
#include <string.h>

uint64_t gguf_load(const unsigned char *p, size_t bytes)
{
    uint64_t v = 0;
    for (size_t i = bytes; i-- > 0;) v = v << 8 | p[i];
    return v;
}

size_t gguf_value_size(uint32_t type)
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

int gguf_string_compare(gguf_string a, gguf_string b)
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
