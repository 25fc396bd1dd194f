#include "safetensors.h"
#include "fail.h"
#include "json.h"
#include "sha256.h"
#include "text.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char metadata_key[] = "__metadata__";

// cJSON needs up to 40 times the text: this bounds what a hostile header can make us allocate to 640 MiB. Headers of
// the largest models are a few MiB.
static const uint64_t header_max = 16u << 20;

static size_t element_size(const char *dtype)
{
    static const struct {
        const char *name;
        size_t size;
    } types[] = {{"F64", 8}, {"I64", 8}, {"U64", 8},  {"F32", 4},     {"I32", 4},
                 {"U32", 4}, {"F16", 2}, {"BF16", 2}, {"I16", 2},     {"U16", 2},
                 {"U8", 1},  {"I8", 1},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strcmp(dtype, types[i].name) == 0) return types[i].size;
    return 0;
}

// JSON numbers are doubles here, so whole numbers are exact up to 2^53.
static bool whole_number(const cJSON *item, uint64_t *out)
{
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= 9007199254740992.0)) return false;
    *out = (uint64_t)item->valuedouble;
    return (double)*out == item->valuedouble;
}

static kvb_status parse_shape(const kvb_safetensors *file, const cJSON *item, kvb_tensor *t, kvb_error *err)
{
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape"), *dim;
    if (!cJSON_IsArray(shape)) {
        return kvb_fail(err, KVB_FORMAT, "%s: header: tensor \"%.64s\": expected \"shape\" to be a list of numbers",
                        file->name, t->name);
    }
    cJSON_ArrayForEach(dim, shape)
    {
        if (t->n_dims == KVB_TENSOR_MAX_DIMS) {
            return kvb_fail(err, KVB_UNSUPPORTED, "%s: header: tensor \"%.64s\": expected at most %d dimensions",
                            file->name, t->name, KVB_TENSOR_MAX_DIMS);
        }
        if (!whole_number(dim, &t->shape[t->n_dims++])) {
            return kvb_fail(err, KVB_FORMAT,
                            "%s: header: tensor \"%.64s\": shape[%u]: expected a whole number that is not negative",
                            file->name, t->name, (unsigned)t->n_dims - 1);
        }
    }
    return KVB_OK;
}

// Computes the bytes that dtype and shape ask for; false if the product does not fit. Looks for zeros first, so that
// [2^53, 2^53, 0] is empty.
static bool tensor_bytes(const kvb_tensor *t, size_t element, uint64_t *out)
{
    uint64_t bytes = element;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        if (t->shape[i] == 0) {
            *out = 0;
            return true;
        }
    }
    for (uint32_t i = 0; i < t->n_dims; i++) {
        if (t->shape[i] > UINT64_MAX / bytes) return false;
        bytes *= t->shape[i];
    }
    *out = bytes;
    return true;
}

static kvb_status parse_tensor(const kvb_safetensors *file, const cJSON *item, const unsigned char *data, uint64_t size,
                               kvb_tensor *t, kvb_error *err)
{
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    uint64_t begin, end, bytes;

    t->name = item->string;
    if (!cJSON_IsObject(item) || !cJSON_IsString(dtype)) {
        return kvb_fail(
            err, KVB_FORMAT,
            "%s: header: tensor \"%.64s\": expected an object with \"dtype\", \"shape\" and \"data_offsets\"",
            file->name, t->name);
    }
    t->dtype = dtype->valuestring;
    if (element_size(t->dtype) == 0) {
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: header: tensor \"%.64s\": unknown dtype \"%.16s\"", file->name,
                        t->name, t->dtype);
    }
    kvb_status status = parse_shape(file, item, t, err);
    if (status) return status;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || !whole_number(offsets->child, &begin) ||
        !whole_number(offsets->child->next, &end) || begin > end || end > size) {
        return kvb_fail(
            err, KVB_FORMAT,
            "%s: header: tensor \"%.64s\": expected \"data_offsets\" [begin, end] with begin <= end <= %llu, "
            "the bytes after the header; the file is cut off or damaged, get it again",
            file->name, t->name, (unsigned long long)size);
    }
    if (!tensor_bytes(t, element_size(t->dtype), &bytes) || bytes != end - begin) {
        return kvb_fail(
            err, KVB_FORMAT,
            "%s: header: tensor \"%.64s\": dtype %s and shape do not fit its data_offsets, which span %llu bytes",
            file->name, t->name, t->dtype, (unsigned long long)(end - begin));
    }
    t->data = data + begin;
    t->size = (size_t)bytes;
    return KVB_OK;
}

static int compare_tensor_names(const void *a, const void *b)
{
    const kvb_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static int compare_places(const void *a, const void *b)
{
    const kvb_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->size > y->size) - (x->size < y->size);
}

// The ranges must tile the data part; a hole would be bytes that nobody checks, an overlap two meanings of one byte.
static kvb_status check_layout(kvb_safetensors *file, const unsigned char *data, size_t size, kvb_error *err)
{
    const unsigned char *reached = data;
    if (file->n_tensors > 0) qsort(file->tensors, file->n_tensors, sizeof *file->tensors, compare_places);
    for (size_t i = 0; i < file->n_tensors; i++) {
        const kvb_tensor *t = &file->tensors[i];
        if (t->data != reached) {
            return kvb_fail(err, KVB_FORMAT,
                            "%s: tensor \"%.64s\": expected to begin at data offset %llu, found %llu: %s", file->name,
                            t->name, (unsigned long long)(reached - data), (unsigned long long)(t->data - data),
                            t->data < reached ? "two tensors overlap" : "the bytes between belong to no tensor");
        }
        reached += t->size;
    }
    if (reached != data + size) {
        return kvb_fail(err, KVB_FORMAT, "%s: expected the file to end after the last tensor, found %llu more bytes",
                        file->name, (unsigned long long)(data + size - reached));
    }
    if (file->n_tensors > 0) qsort(file->tensors, file->n_tensors, sizeof *file->tensors, compare_tensor_names);
    return KVB_OK;
}

static kvb_status check_metadata(const kvb_safetensors *file, const cJSON *metadata, kvb_error *err)
{
    const cJSON *item;
    if (!cJSON_IsObject(metadata))
        return kvb_fail(err, KVB_FORMAT, "%s: header: expected \"%s\" to be an object", file->name, metadata_key);
    cJSON_ArrayForEach(item, metadata)
    {
        if (!cJSON_IsString(item))
            return kvb_fail(err, KVB_FORMAT, "%s: metadata \"%.64s\": expected a string", file->name, item->string);
    }
    return KVB_OK;
}

static kvb_status parse_entries(kvb_safetensors *out, const unsigned char *data, size_t size, kvb_error *err)
{
    const cJSON *item;
    kvb_status status;

    out->tensors = calloc((size_t)cJSON_GetArraySize(out->header) + 1, sizeof *out->tensors);
    if (!out->tensors) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for the header", out->name);
    cJSON_ArrayForEach(item, out->header)
    {
        if (strcmp(item->string, metadata_key) != 0) {
            status = parse_tensor(out, item, data, size, &out->tensors[out->n_tensors++], err);
        } else {
            status = check_metadata(out, item, err);
        }
        if (status) return status;
    }
    return check_layout(out, data, size, err);
}

bool kvb_content_sha256(const void *data, size_t size, size_t *place, char hex[65])
{
    // In JSON text these bytes can only be a key followed by a string: quotes inside strings are escaped.
    static const char key[] = "\"" KVB_CONTENT_KEY "\":\"";
    static const char zeros[] = "0000000000000000000000000000000000000000000000000000000000000000";
    const size_t length = sizeof key - 1, n_digits = sizeof zeros - 1;
    const char *text = data;
    size_t at = 8;
    while (at + length + n_digits <= size && memcmp(text + at, key, length) != 0) at++;
    if (at + length + n_digits > size) return false;
    *place = at + length;
    const kvb_bytes pieces[] = {
        {text, *place}, {zeros, n_digits}, {text + *place + n_digits, size - *place - n_digits}};
    kvb_sha256(pieces, 3, hex);
    return true;
}

static kvb_status check_content(const kvb_safetensors *file, const void *data, size_t size, kvb_error *err)
{
    const char *said = kvb_safetensors_metadata(file->header, KVB_CONTENT_KEY);
    char hex[65] = "";
    size_t place = 0;
    if (!said || (kvb_content_sha256(data, size, &place, hex) && strcmp(said, hex) == 0)) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT,
                    "%s: metadata \"" KVB_CONTENT_KEY
                    "\": says %.64s, the file has %s: it is damaged, get it again; if "
                    "it was changed on purpose, leave that entry out",
                    file->name, said, *hex ? hex : "another form");
}

kvb_status kvb_safetensors_parse(kvb_safetensors *out, const void *data, size_t size, const char *name, kvb_error *err)
{
    const unsigned char *bytes = data;
    uint64_t header_size = 0;
    size_t name_size = strlen(name), name_max = 160;
    kvb_status status;

    memset(out, 0, sizeof *out);
    out->name = name_size > name_max ? name + (name_size - name_max) : name;
    if (size < 8) {
        return kvb_fail(err, KVB_FORMAT, "%s: expected at least 8 bytes, found %zu; not a safetensors file, or cut off",
                        out->name, size);
    }
    for (int i = 7; i >= 0; --i) header_size = header_size << 8 | bytes[i];
    if (header_size < 2 || header_size > size - 8) {
        return kvb_fail(
            err, KVB_FORMAT,
            "%s: header length at offset 0: expected 2 to %zu, found %llu; not a safetensors file, or cut off",
            out->name, size - 8, (unsigned long long)header_size);
    }
    if (header_size > header_max) {
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: header length at offset 0: expected at most %llu, found %llu",
                        out->name, (unsigned long long)header_max, (unsigned long long)header_size);
    }
    status = kvb_json_object(&out->header, (const char *)bytes + 8, (size_t)header_size, out->name, "header", err);
    if (!status) status = parse_entries(out, bytes + 8 + header_size, size - 8 - (size_t)header_size, err);
    if (!status) status = check_content(out, data, size, err);
    if (status) kvb_safetensors_free(out);
    return status;
}

double kvb_load_f64(const unsigned char *p)
{
    uint64_t bits = 0;
    double value;
    for (int i = 7; i >= 0; --i) bits = bits << 8 | p[i];
    memcpy(&value, &bits, sizeof value);
    return value;
}

const kvb_tensor *kvb_safetensors_find(const kvb_safetensors *file, const char *name)
{
    kvb_tensor wanted = {0};
    wanted.name = name;
    return file->n_tensors ? bsearch(&wanted, file->tensors, file->n_tensors, sizeof wanted, compare_tensor_names)
                           : NULL;
}

const char *kvb_safetensors_metadata(const cJSON *header, const char *key)
{
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(header, metadata_key);
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, key));
}

void kvb_safetensors_free(kvb_safetensors *file)
{
    cJSON_Delete(file->header);
    free(file->tensors);
    memset(file, 0, sizeof *file);
}

// ---- Files ----

kvb_status kvb_file_accept(const unsigned char *data, size_t size, const char *name, size_t limit, kvb_error *err)
{
    kvb_file_kind kind = kvb_kind_of_file(data, size);
    if (kind != KVB_FILE_OTHER && kind != KVB_FILE_SAFETENSORS)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: expected a table (.safetensors), found %s; `kvbudget solve` makes tables of records", name,
                        kvb_kind_name(kind));
    if (size <= limit) return KVB_OK;
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s: expected a table of at most %zu bytes, found more: a model's weights, or files in another "
                    "order than asked for? A program may raise max_bytes",
                    name, limit);
}

// Reads to the end, but stops once there are more than `limit` bytes: the size of a pipe is not known beforehand.
static kvb_status read_stream(FILE *stream, const char *path, size_t limit, unsigned char **data, size_t *size,
                              kvb_error *err)
{
    size_t cap = 0;
    *data = NULL;
    *size = 0;
    do {
        if (*size == cap) {
            size_t room = cap ? cap * 2 : 1u << 16;
            unsigned char *grown = room > cap ? realloc(*data, room) : NULL;
            if (!grown) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory for %zu bytes", path, room);
            *data = grown;
            cap = room;
        }
        errno = 0;
        *size += fread(*data + *size, 1, cap - *size, stream);
        if (ferror(stream)) return kvb_fail(err, KVB_IO, "%s: reading: %s", path, strerror(errno));
        kvb_status status = kvb_file_accept(*data, *size, path, limit, err);
        if (status) return status;
    } while (!feof(stream));
    return KVB_OK;
}

kvb_status kvb_file_read(unsigned char **data, size_t *size, const char *path, size_t limit, kvb_error *err)
{
    FILE *stream = fopen(path, "rb");
    *data = NULL;
    *size = 0;
    if (!stream) return kvb_fail(err, KVB_IO, "%s: opening: %s", path, strerror(errno));
    kvb_status status = read_stream(stream, path, limit, data, size, err);
    (void)fclose(stream); // only read
    return status;
}
