#include "tensor_file.h"
#include "runtime/fail.h"
#include "runtime/safetensors.h"
#include <endian.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

size_t tensor_count(const tensor_entry *t)
{
    size_t count = 1;
    for (int i = 0; i < t->n_dims; i++) count *= t->dims[i];
    return count;
}

static size_t tensor_bytes(const tensor_entry *t)
{
    return tensor_count(t) * (t->f64 ? sizeof(double) : 1);
}

static bool add_tensor(cJSON *header, const tensor_entry *x, size_t begin)
{
    cJSON *entry = cJSON_AddObjectToObject(header, x->name);
    bool ok = entry && cJSON_AddStringToObject(entry, "dtype", x->f64 ? "F64" : "U8");
    cJSON *shape = ok ? cJSON_AddArrayToObject(entry, "shape") : NULL;
    for (int i = 0; ok && i < x->n_dims; i++) ok = cJSON_AddItemToArray(shape, cJSON_CreateNumber(x->dims[i]));
    cJSON *offsets = ok ? cJSON_AddArrayToObject(entry, "data_offsets") : NULL;
    return offsets && cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)begin)) &&
           cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(begin + tensor_bytes(x))));
}

// What stands in the place of the file's hash while it is computed: as many characters as it has digits.
static const char no_digits[] = "0000000000000000000000000000000000000000000000000000000000000000";

// The JSON header as text, malloc'd; NULL when memory is short. *data_size receives the bytes of all tensors.
static char *make_header(const tensor_entry *tensors, size_t n, const cJSON *about, size_t *data_size)
{
    cJSON *header = cJSON_CreateObject(), *metadata = cJSON_Duplicate(about, 1);
    cJSON_DeleteItemFromObjectCaseSensitive(metadata, KVB_CONTENT_KEY); // of the file that `about` was read from
    if (!header || !cJSON_AddStringToObject(metadata, KVB_CONTENT_KEY, no_digits) || !metadata ||
        !cJSON_AddItemToObject(header, "__metadata__", metadata)) {
        cJSON_Delete(metadata);
        cJSON_Delete(header);
        return NULL;
    }
    bool ok = true;
    *data_size = 0;
    for (size_t i = 0; i < n && ok; i++) {
        ok = add_tensor(header, &tensors[i], *data_size);
        *data_size += tensor_bytes(&tensors[i]);
    }
    char *text = ok ? cJSON_PrintUnformatted(header) : NULL;
    cJSON_Delete(header);
    return text;
}

static unsigned char *put_u64(unsigned char *at, uint64_t x)
{
    x = htole64(x);
    memcpy(at, &x, sizeof x);
    return at + sizeof x;
}

static unsigned char *put_tensor(unsigned char *at, const tensor_entry *x)
{
    size_t count = tensor_count(x);
    if (x->u8) {
        memcpy(at, x->u8, count);
        return at + count;
    }
    for (size_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, &x->f64[i], sizeof bits);
        at = put_u64(at, bits);
    }
    return at;
}

kvb_status tensor_file_make(unsigned char **out, size_t *size, const tensor_entry *tensors, size_t n,
                            const cJSON *metadata, kvb_error *err)
{
    size_t data_size, text_size = 0, header_size = 0;
    char *text = make_header(tensors, n, metadata, &data_size);
    *out = NULL;
    if (text) {
        text_size = strlen(text);
        header_size = (text_size + 7) / 8 * 8; // so that the tensors begin at a multiple of 8
        *size = 8 + header_size + data_size;
        *out = malloc(*size);
    }
    if (*out) {
        unsigned char *at = put_u64(*out, header_size);
        memcpy(at, text, text_size);
        memset(at + text_size, ' ', header_size - text_size);
        at += header_size;
        for (size_t i = 0; i < n; i++) at = put_tensor(at, &tensors[i]);
        char hex[65];
        size_t place;
        if (kvb_content_sha256(*out, *size, &place, hex)) memcpy(*out + place, hex, sizeof hex - 1);
    }
    free(text);
    return *out ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for the bytes of a file");
}
