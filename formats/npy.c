// Specification: numpy.lib.format. The header is a Python dictionary of three entries.
#include "npy.h"
#include "atomic_file.h"
#include "need.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include <cjson/cJSON.h>
#include <ctype.h>
#include <endian.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER == __LITTLE_ENDIAN, "elements are copied as they lie in memory");

static const unsigned char magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};

static const struct {
    const char *descr;
    size_t size;
} types[] = {[NPY_F32] = {"<f4", 4}, [NPY_F64] = {"<f8", 8}, [NPY_I32] = {"<i4", 4}, [NPY_I64] = {"<i8", 8}};
enum { N_TYPES = sizeof types / sizeof types[0] };

size_t npy_type_size(npy_type type)
{
    return types[type].size;
}

// ---- Header ----

// Turns Python's dictionary into JSON: double quotes, lists for tuples (a tuple of one element has a comma), no comma
// at the end. The caller frees the text.
static char *header_as_json(size_t *length, const char *text, size_t size)
{
    char *json = need(size + 1, 1, "characters of a header");
    size_t n = 0, tuple = 0; // where the innermost tuple began
    bool comma = false;
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        if (c == '(') tuple = n, comma = false, c = '[';
        if (c == ',') comma = true;
        if (c == ')' && (comma || n == tuple + 1)) c = ']';
        if (c == ']' || c == '}') {
            size_t last = n;
            while (last && strchr(" \n\t", json[last - 1])) last--;
            if (last && json[last - 1] == ',') n = last - 1;
        }
        json[n++] = c == '\'' ? '"' : (char)(c == 'T' || c == 'F' ? tolower(c) : c);
    }
    *length = n;
    return json;
}

static bool read_shape(npy_array *out, const cJSON *list)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, list)
    {
        double x = cJSON_IsNumber(item) ? item->valuedouble : -1;
        if (out->n_dims == NPY_MAX_DIMS || !(x >= 0 && x < 0x1p63) || x != floor(x)) return false;
        out->shape[out->n_dims++] = (uint64_t)x;
    }
    return cJSON_IsArray(list);
}

static kvb_status bad_header(size_t place, const char *name, kvb_error *err)
{
    return kvb_fail(err, KVB_FORMAT,
                    "%s: byte %zu: expected {'descr': .., 'fortran_order': .., 'shape': ..} of one plain type and at "
                    "most %d dimensions",
                    name, place, NPY_MAX_DIMS);
}

static kvb_status read_header(npy_array *out, const cJSON *header, size_t begin, const char *name, kvb_error *err)
{
    const cJSON *descr = cJSON_GetObjectItemCaseSensitive(header, "descr"),
                *order = cJSON_GetObjectItemCaseSensitive(header, "fortran_order"),
                *shape = cJSON_GetObjectItemCaseSensitive(header, "shape");
    if (!descr || !order || !shape)
        return kvb_fail(err, KVB_FORMAT, "%s: header: %s is missing", name,
                        !descr   ? "descr"
                        : !order ? "fortran_order"
                                 : "shape");
    if (!cJSON_IsString(descr) || !cJSON_IsBool(order) || !read_shape(out, shape) || cJSON_GetArraySize(header) != 3)
        return bad_header(begin, name, err);
    if (cJSON_IsTrue(order))
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: header: Fortran order; save numpy.ascontiguousarray(x) instead",
                        name);
    for (int i = 0; i < N_TYPES; i++) {
        if (strcmp(descr->valuestring, types[i].descr) == 0) {
            out->type = (npy_type)i;
            return KVB_OK;
        }
    }
    return kvb_fail(err, KVB_UNSUPPORTED, "%s: header: element type %.20s, expected <f4, <f8, <i4 or <i8", name,
                    descr->valuestring);
}

static kvb_status parse_header(npy_array *out, const char *text, size_t size, size_t begin, const char *name,
                               kvb_error *err)
{
    size_t n;
    char *json = header_as_json(&n, text, size);
    const char *end = json;
    cJSON *header = kvb_json_parse(json, n, &end, NULL);
    while (header && end < json + n && *end && strchr(" \n\t", *end)) end++;
    bool whole = cJSON_IsObject(header) && end == json + n;
    kvb_status status =
        whole ? read_header(out, header, begin, name, err) : bad_header(begin + (size_t)(end - json), name, err);
    cJSON_Delete(header);
    free(json);
    return status;
}

// Where the header's text lies: the length has 2 bytes in version 1, 4 in versions 2 and 3.
static kvb_status find_header(size_t *begin, size_t *end, const unsigned char *p, size_t size, const char *name,
                              kvb_error *err)
{
    if (size < 10 || memcmp(p, magic, sizeof magic) != 0)
        return kvb_fail(err, KVB_FORMAT, "%s: byte 0: expected the signature of a .npy file", name);
    if (p[6] < 1 || p[6] > 3 || p[7] != 0)
        return kvb_fail(err, KVB_VERSION, "%s: byte 6: .npy version %u.%u, expected 1.0, 2.0 or 3.0", name, p[6], p[7]);
    *begin = p[6] == 1 ? 10 : 12;
    size_t length = p[8] | (size_t)p[9] << 8;
    if (p[6] > 1) {
        if (size < 12) return kvb_fail(err, KVB_FORMAT, "%s: byte %zu: cut off in the header", name, size);
        length |= (size_t)p[10] << 16 | (size_t)p[11] << 24;
    }
    if (length > size - *begin)
        return kvb_fail(err, KVB_FORMAT, "%s: byte 8: header of %zu bytes, the file has %zu", name, length, size);
    *end = *begin + length;
    return KVB_OK;
}

kvb_status npy_parse(npy_array *out, const void *data, size_t size, const char *name, kvb_error *err)
{
    memset(out, 0, sizeof *out);
    size_t begin = 0, end = 0, count = 1, bytes;
    kvb_status status = find_header(&begin, &end, data, size, name, err);
    if (status != KVB_OK) return status;
    status = parse_header(out, (const char *)data + begin, end - begin, begin, name, err);
    if (status != KVB_OK) return status;
    bool overflow = false, empty = false;
    for (uint32_t i = 0; i < out->n_dims; i++) {
        empty |= out->shape[i] == 0;
        overflow |= __builtin_mul_overflow(count, out->shape[i], &count);
    }
    if (empty) count = 0;
    overflow = (overflow && !empty) || __builtin_mul_overflow(count, types[out->type].size, &bytes);
    if (overflow || bytes != size - end)
        return kvb_fail(err, KVB_FORMAT, "%s: byte %zu: expected %s%zu bytes of data as the shape says, found %zu",
                        name, end, overflow ? "over " : "", overflow ? SIZE_MAX : bytes, size - end);
    out->count = count;
    out->data = (const char *)data + end;
    return KVB_OK;
}

// ---- Elements ----

static kvb_status cannot_convert(const npy_array *a, const char *wanted, const char *name, kvb_error *err)
{
    return kvb_fail(err, KVB_UNSUPPORTED, "%s: holds elements of type %s, expected %s", name, types[a->type].descr,
                    wanted);
}

static double get_f64(const npy_array *a, size_t i)
{
    double x;
    memcpy(&x, (const char *)a->data + i * sizeof x, sizeof x);
    return x;
}

static int64_t get_integer(const npy_array *a, size_t i)
{
    int32_t small;
    int64_t x;
    if (a->type == NPY_I32) {
        memcpy(&small, (const char *)a->data + i * sizeof small, sizeof small);
        return small;
    }
    memcpy(&x, (const char *)a->data + i * sizeof x, sizeof x);
    return x;
}

kvb_status npy_to_f32(const npy_array *a, float *out, const char *name, kvb_error *err)
{
    if (a->type == NPY_F32) memcpy(out, a->data, a->count * sizeof *out);
    else if (a->type == NPY_F64)
        for (size_t i = 0; i < a->count; i++) out[i] = (float)get_f64(a, i);
    else return cannot_convert(a, "<f4 or <f8", name, err);
    return KVB_OK;
}

kvb_status npy_to_f64(const npy_array *a, double *out, const char *name, kvb_error *err)
{
    for (size_t i = 0; i < a->count; i++) {
        float single;
        if (a->type == NPY_F64) {
            out[i] = get_f64(a, i);
        } else if (a->type == NPY_F32) {
            memcpy(&single, (const char *)a->data + i * sizeof single, sizeof single);
            out[i] = single;
        } else {
            int64_t x = get_integer(a, i), limit = INT64_C(1) << 53;
            if (x > limit || x < -limit)
                return kvb_fail(err, KVB_NUMERIC, "%s: element %zu: %lld is beyond what a double can tell apart", name,
                                i, (long long)x);
            out[i] = (double)x;
        }
    }
    return KVB_OK;
}

kvb_status npy_to_i32(const npy_array *a, int32_t *out, const char *name, kvb_error *err)
{
    if (a->type != NPY_I32 && a->type != NPY_I64) return cannot_convert(a, "<i4 or <i8", name, err);
    for (size_t i = 0; i < a->count; i++) {
        int64_t x = get_integer(a, i);
        if (x < INT32_MIN || x > INT32_MAX)
            return kvb_fail(err, KVB_NUMERIC, "%s: element %zu: %lld does not fit 32 bits", name, i, (long long)x);
        out[i] = (int32_t)x;
    }
    return KVB_OK;
}

// ---- Writing ----

// Formats the whole beginning of the file, a multiple of 64 bytes. Returns its size, or 0 if it does not fit.
static size_t format_header(unsigned char *out, size_t size, npy_type type, uint32_t n_dims, const uint64_t *shape)
{
    char text[320];
    int n = snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': (", types[type].descr);
    for (uint32_t i = 0; i < n_dims; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%llu%s", i ? " " : "", (unsigned long long)shape[i],
                      i + 1 < n_dims || n_dims == 1 ? "," : "");
    n += snprintf(text + n, sizeof text - (size_t)n, "), }"); // at most 8 x 22 characters of shape: it fits
    size_t total = (10 + (size_t)n + 1 + 63) / 64 * 64, length = total - 10;
    if (total > size) return 0;
    memset(out, ' ', total);
    memcpy(out, magic, sizeof magic);
    memcpy(out + 6, (unsigned char[4]){1, 0, (unsigned char)(length & 255), (unsigned char)(length >> 8)}, 4);
    memcpy(out + 10, text, (size_t)n);
    out[total - 1] = '\n';
    return total;
}

kvb_status npy_write(const char *path, npy_type type, uint32_t n_dims, const uint64_t *shape, const void *data,
                     kvb_error *err)
{
    size_t bytes = types[type].size;
    bool fits = n_dims <= NPY_MAX_DIMS;
    for (uint32_t i = 0; fits && i < n_dims; i++) fits = !__builtin_mul_overflow(bytes, shape[i], &bytes);
    unsigned char header_bytes[512];
    size_t header_size = fits ? format_header(header_bytes, sizeof header_bytes, type, n_dims, shape) : 0;
    if (header_size == 0)
        return kvb_fail(err, KVB_ARGUMENT, "%s: an array of %u dimensions and this shape cannot be written", path,
                        n_dims);
    atomic_file f;
    kvb_status status = atomic_file_begin(&f, path, err);
    if (status != KVB_OK) return status;
    if (fwrite(header_bytes, 1, header_size, f.stream) != header_size ||
        (bytes > 0 && fwrite(data, 1, bytes, f.stream) != bytes)) {
        status =
            kvb_fail(err, KVB_IO, "%s: cannot write %zu bytes: %s; nothing was changed", path, bytes, strerror(errno));
        atomic_file_abandon(&f);
        return status;
    }
    return atomic_file_commit(&f, err);
}
