#include "table_write.h"
#include "atomic_file.h"
#include "runtime/fail.h"
#include <endian.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { N_TENSORS = 9 };

// The order in the file. F64 first, so that every tensor is aligned to its element size.
typedef struct tensor {
    const char *name;
    const double *f64;
    const uint8_t *u8; // set instead of f64
    bool per_head;     // [R,L,G], else [R]
    size_t count;
} tensor;

static kvb_status list_tensors(tensor out[N_TENSORS], const table_content *t, kvb_error *err)
{
    const tensor all[N_TENSORS] = {
        {"prune_ratio", t->prune_ratio, NULL, true, 0},
        {"std", t->std, NULL, true, 0},
        {"ratio", t->ratio, NULL, false, 0},
        {"loss", t->loss, NULL, false, 0},
        {"lower_bound", t->lower_bound, NULL, false, 0},
        {"lambda", t->lambda, NULL, false, 0},
        {"table_loss", t->table_loss, NULL, false, 0},
        {"effective_ratio", t->effective_ratio, NULL, false, 0},
        {"saturated", NULL, t->saturated, false, 0},
    };
    size_t per_head, bytes;
    if (t->n_rows == 0 || t->n_layers == 0 || t->n_kv_heads == 0 ||
        __builtin_mul_overflow((size_t)t->n_rows * t->n_layers, t->n_kv_heads, &per_head) ||
        __builtin_mul_overflow(per_head, 4 * sizeof(double), &bytes)) // two of them, and room to spare for the rest
        return kvb_fail(err, KVB_ARGUMENT, "table: impossible shape [%u,%u,%u]", t->n_rows, t->n_layers, t->n_kv_heads);
    for (int i = 0; i < N_TENSORS; i++) {
        out[i] = all[i];
        out[i].count = all[i].per_head ? per_head : t->n_rows;
        if (!out[i].f64 && !out[i].u8) return kvb_fail(err, KVB_ARGUMENT, "table: %s: is NULL", out[i].name);
    }
    return KVB_OK;
}

// ---- Checks ----

static kvb_status check_numbers(const table_content *t, const tensor tensors[N_TENSORS], kvb_error *err)
{
    for (int k = 0; k < N_TENSORS; k++) {
        const tensor *x = &tensors[k];
        for (size_t i = 0; i < x->count; i++) {
            if (x->f64 && !isfinite(x->f64[i]))
                return kvb_fail(err, KVB_NUMERIC, "table: %s: element %zu is %g", x->name, i, x->f64[i]);
            if (x->u8 && x->u8[i] > 1)
                return kvb_fail(err, KVB_ARGUMENT, "table: %s: element %zu is %u, expected 0 or 1", x->name, i,
                                x->u8[i]);
        }
    }
    for (size_t i = 0; i < tensors[0].count; i++) {
        if (!(t->prune_ratio[i] >= 0 && t->prune_ratio[i] <= 1))
            return kvb_fail(err, KVB_ARGUMENT, "table: prune_ratio: element %zu is %.17g, expected 0 to 1", i,
                            t->prune_ratio[i]);
    }
    for (uint32_t i = 0; i < t->n_rows; i++) {
        if (!(t->ratio[i] > (i ? t->ratio[i - 1] : 0) && t->ratio[i] < 1))
            return kvb_fail(err, KVB_ARGUMENT, "table: ratio: element %u is %.17g, expected ascending in (0,1)", i,
                            t->ratio[i]);
    }
    return KVB_OK;
}

static bool has_text(const cJSON *object, const char *key, const char *text)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsString(item) && strcmp(item->valuestring, text) == 0;
}

static kvb_status check_metadata(const cJSON *metadata, kvb_error *err)
{
    if (!cJSON_IsObject(metadata)) return kvb_fail(err, KVB_ARGUMENT, "table: the metadata are not a JSON object");
    const cJSON *item;
    cJSON_ArrayForEach(item, metadata)
    {
        if (!cJSON_IsString(item))
            return kvb_fail(err, KVB_ARGUMENT, "table: metadata %s: expected a string", item->string);
    }
    if (!has_text(metadata, "format", "kvbudget-table") || !has_text(metadata, "format_version", "1"))
        return kvb_fail(err, KVB_ARGUMENT, "table: metadata: expected format \"kvbudget-table\", format_version \"1\"");
    return KVB_OK;
}

// ---- Header ----

static bool add_tensor(cJSON *header, const table_content *t, const tensor *x, size_t begin, size_t end)
{
    cJSON *entry = cJSON_AddObjectToObject(header, x->name);
    bool ok = entry && cJSON_AddStringToObject(entry, "dtype", x->f64 ? "F64" : "U8");
    cJSON *shape = ok ? cJSON_AddArrayToObject(entry, "shape") : NULL;
    const uint32_t dims[3] = {t->n_rows, t->n_layers, t->n_kv_heads};
    for (int i = 0; ok && i < (x->per_head ? 3 : 1); i++) ok = cJSON_AddItemToArray(shape, cJSON_CreateNumber(dims[i]));
    cJSON *offsets = ok ? cJSON_AddArrayToObject(entry, "data_offsets") : NULL;
    return offsets && cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)begin)) &&
           cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)end));
}

// The JSON header as text, malloc'd; NULL when memory is short. *data_size receives the bytes of all tensors.
static char *make_header(const table_content *t, const tensor tensors[N_TENSORS], size_t *data_size)
{
    cJSON *header = cJSON_CreateObject(), *metadata = cJSON_Duplicate(t->metadata, 1);
    if (!header || !metadata || !cJSON_AddItemToObject(header, "__metadata__", metadata)) {
        cJSON_Delete(metadata);
        cJSON_Delete(header);
        return NULL;
    }
    size_t offset = 0;
    bool ok = true;
    for (int i = 0; i < N_TENSORS && ok; i++) {
        size_t end = offset + tensors[i].count * (tensors[i].f64 ? sizeof(double) : 1);
        ok = add_tensor(header, t, &tensors[i], offset, end);
        offset = end;
    }
    char *text = ok ? cJSON_PrintUnformatted(header) : NULL;
    cJSON_Delete(header);
    *data_size = offset;
    return text;
}

// ---- Bytes ----

static unsigned char *put_u64(unsigned char *at, uint64_t x)
{
    x = htole64(x);
    memcpy(at, &x, sizeof x);
    return at + sizeof x;
}

static unsigned char *put_tensor(unsigned char *at, const tensor *x)
{
    if (x->u8) {
        memcpy(at, x->u8, x->count);
        return at + x->count;
    }
    for (size_t i = 0; i < x->count; i++) {
        uint64_t bits;
        memcpy(&bits, &x->f64[i], sizeof bits);
        at = put_u64(at, bits);
    }
    return at;
}

kvb_status table_serialize(unsigned char **out, size_t *size, const table_content *t, kvb_error *err)
{
    *out = NULL;
    tensor tensors[N_TENSORS];
    kvb_status status = list_tensors(tensors, t, err);
    if (status == KVB_OK) status = check_numbers(t, tensors, err);
    if (status == KVB_OK) status = check_metadata(t->metadata, err);
    if (status != KVB_OK) return status;
    size_t data_size, text_size, header_size;
    char *text = make_header(t, tensors, &data_size);
    unsigned char *bytes = NULL;
    if (text) {
        text_size = strlen(text);
        header_size = (text_size + 7) / 8 * 8; // so that the tensors begin at a multiple of 8
        *size = 8 + header_size + data_size;
        bytes = malloc(*size);
    }
    if (bytes) {
        unsigned char *at = put_u64(bytes, header_size);
        memcpy(at, text, text_size);
        memset(at + text_size, ' ', header_size - text_size);
        at += header_size;
        for (int i = 0; i < N_TENSORS; i++) at = put_tensor(at, &tensors[i]);
        *out = bytes;
    } else {
        status = kvb_fail(err, KVB_MEMORY, "table: not enough memory");
    }
    free(text);
    return status;
}

kvb_status table_write(const char *path, const table_content *t, kvb_error *err)
{
    unsigned char *bytes;
    size_t size;
    kvb_table *table = NULL;
    kvb_status status = table_serialize(&bytes, &size, t, err);
    if (status != KVB_OK) return status;
    // Nothing is written that the runtime would not open again.
    const kvb_table_options no_limit = {SIZE_MAX};
    status = kvb_table_open_memory(&table, bytes, size, path, &no_limit, err);
    kvb_table_close(table);
    if (status == KVB_OK) status = atomic_write(path, bytes, size, err);
    free(bytes);
    return status;
}
