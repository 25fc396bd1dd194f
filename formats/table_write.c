#include "formats/table_write.h"
#include "formats/atomic_file.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "runtime/json.h"
#include "runtime/rank.h"
#include "runtime/safetensors.h"
#include "runtime/sha256.h"
#include "runtime/table.h"
#include <endian.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- The bytes of a safetensors file ----

// One tensor, row-major; the numbers are the caller's.
typedef struct tensor_entry {
    const char *name;
    const double *f64;
    const uint8_t *u8; // set instead of f64
    int n_dims;
    uint32_t dims[4];
} tensor_entry;

static size_t tensor_count(const tensor_entry *t)
{
    size_t count = 1;
    for (int i = 0; i < t->n_dims; i++) count *= t->dims[i];
    return count;
}

static size_t tensor_bytes(const tensor_entry *t)
{
    return tensor_count(t) * (t->f64 ? sizeof(double) : 1);
}

static void add_tensor(cJSON *header, const tensor_entry *x, size_t begin)
{
    cJSON *entry = cJSON_AddObjectToObject(header, x->name);
    cJSON_AddStringToObject(entry, "dtype", x->f64 ? "F64" : "U8");
    cJSON *shape = cJSON_AddArrayToObject(entry, "shape");
    for (int i = 0; i < x->n_dims; i++) cJSON_AddItemToArray(shape, cJSON_CreateNumber(x->dims[i]));
    cJSON *offsets = cJSON_AddArrayToObject(entry, "data_offsets");
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)begin));
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(begin + tensor_bytes(x))));
}

// Stands in for the file's hash while that is computed, with as many characters.
static const char no_digits[] = "0000000000000000000000000000000000000000000000000000000000000000";

// The JSON header as text. *data_size receives the bytes of all tensors.
static char *make_header(const tensor_entry *tensors, size_t n, const cJSON *about, size_t *data_size)
{
    cJSON *header = cJSON_CreateObject(), *metadata = cJSON_Duplicate(about, 1);
    cJSON_DeleteItemFromObjectCaseSensitive(metadata, KVB_CONTENT_KEY); // of the file that `about` was read from
    cJSON_AddStringToObject(metadata, KVB_CONTENT_KEY, no_digits);
    cJSON_AddItemToObject(header, "__metadata__", metadata);
    *data_size = 0;
    for (size_t i = 0; i < n; i++) {
        add_tensor(header, &tensors[i], *data_size);
        *data_size += tensor_bytes(&tensors[i]);
    }
    char *text = cJSON_PrintUnformatted(header);
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

// Lays tensors one after the other in the given order, F64 before U8, so that every tensor is aligned; and metadata, a
// flat object of strings, to which "content_sha256" is added (runtime/safetensors.h). Equal content gives equal bytes.
// The caller frees them.
static unsigned char *make_file(size_t *size, const tensor_entry *tensors, size_t n, const cJSON *metadata)
{
    size_t data_size;
    char *text = make_header(tensors, n, metadata, &data_size), hex[65];
    size_t text_size = strlen(text), header_size = (text_size + 7) / 8 * 8; // tensors begin at a multiple of 8
    *size = 8 + header_size + data_size;
    unsigned char *out = need(*size, 1, "bytes of a file"), *at = put_u64(out, header_size);
    memcpy(at, text, text_size);
    memset(at + text_size, ' ', header_size - text_size);
    at += header_size;
    for (size_t i = 0; i < n; i++) at = put_tensor(at, &tensors[i]);
    size_t place;
    if (kvb_content_sha256(out, *size, &place, hex)) memcpy(out + place, hex, sizeof hex - 1);
    cJSON_free(text);
    return out;
}

// ---- Learned rankings ----

static tensor_entry rank_tensor(const rank_content *r)
{
    return (tensor_entry){
        "rank_weights", r->weights, NULL, 4, {1 + r->n_folds, r->n_layers, r->n_kv_heads, r->n_columns}};
}

rank_content rank_content_of(const kvb_ranking *r)
{
    return (rank_content){r->n_folds,        r->info.n_layers, r->info.n_kv_heads,
                          r->info.n_columns, r->weights,       r->info.about};
}

char *rank_name(char name[24], const rank_content *r)
{
    char hash[65];
    tensor_entry weights = rank_tensor(r);
    const kvb_bytes pieces[] = {{r->about, strlen(r->about)},
                                {r->weights, tensor_count(&weights) * sizeof *r->weights}};
    kvb_sha256(pieces, 2, hash);
    snprintf(name, 24, "learned:%.12s", hash);
    return need_text("%.*s,\"name\":\"%s\"}", (int)strlen(r->about) - 1, r->about, name);
}

kvb_status rank_write(const char *path, const rank_content *r, const cJSON *metadata, kvb_error *err)
{
    size_t size;
    kvb_ranking *back = NULL;
    const tensor_entry weights = rank_tensor(r);
    cJSON *all = cJSON_Duplicate(metadata, 1);
    json_put(all, "format %s format_version %s ranking %s", "kvbudget-rank", "1", r->about);
    unsigned char *bytes = make_file(&size, &weights, 1, all);
    kvb_status status = kvb_ranking_open_memory(&back, bytes, size, path, err);
    kvb_ranking_close(back);
    if (status == KVB_OK) status = atomic_write(path, bytes, size, err);
    free(bytes);
    cJSON_Delete(all);
    return status;
}

// ---- Tables ----

enum { N_TENSORS = 11, N_TABLE = 9 }; // with that of a ranking, and formats

// The order in the file. F64 first, so that every tensor is aligned to its element size.
static kvb_status list_tensors(tensor_entry out[N_TENSORS], size_t *n, const table_content *t, kvb_error *err)
{
    const struct {
        const char *name;
        const double *f64;
        bool per_head; // [R,L,G], else [R]
    } all[N_TABLE - 1] = {
        {"prune_ratio", t->prune_ratio, true},
        {"std", t->std, true},
        {"ratio", t->ratio, false},
        {"loss", t->loss, false},
        {"lower_bound", t->lower_bound, false},
        {"lambda", t->lambda, false},
        {"table_loss", t->table_loss, false},
        {"effective_ratio", t->effective_ratio, false},
    };
    size_t per_head, bytes;
    if (t->n_rows == 0 || t->n_layers == 0 || t->n_kv_heads == 0 ||
        __builtin_mul_overflow((size_t)t->n_rows * t->n_layers, t->n_kv_heads, &per_head) ||
        __builtin_mul_overflow(per_head, 4 * sizeof(double), &bytes)) // two of them, and room to spare for the rest
        return kvb_fail(err, KVB_ARGUMENT, "table: impossible shape [%u,%u,%u]", t->n_rows, t->n_layers, t->n_kv_heads);
    *n = 0;
    for (int i = 0; i < N_TABLE - 1; i++) {
        out[(*n)++] = (tensor_entry){
            all[i].name, all[i].f64, NULL, all[i].per_head ? 3 : 1, {t->n_rows, t->n_layers, t->n_kv_heads}};
        if (!all[i].f64) return kvb_fail(err, KVB_ARGUMENT, "table: %s: is NULL", all[i].name);
    }
    if (!t->saturated) return kvb_fail(err, KVB_ARGUMENT, "table: saturated: is NULL");
    if (t->ranking) out[(*n)++] = rank_tensor(t->ranking);
    out[(*n)++] = (tensor_entry){"saturated", NULL, t->saturated, 1, {t->n_rows}};
    if (t->formats)
        out[(*n)++] = (tensor_entry){"formats", NULL, t->formats, 4, {t->n_rows, t->n_layers, t->n_kv_heads, 2}};
    return KVB_OK;
}

kvb_status table_serialize(unsigned char **out, size_t *size, const table_content *t, kvb_error *err)
{
    *out = NULL;
    tensor_entry tensors[N_TENSORS];
    size_t n = 0;
    kvb_status status = list_tensors(tensors, &n, t, err);
    if (status == KVB_OK) *out = make_file(size, tensors, n, t->metadata);
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

table_content table_content_of(const kvb_table *table, const cJSON *metadata, rank_content *ranking)
{
    if (table->ranking) *ranking = rank_content_of(table->ranking);
    return (table_content){.n_rows = table->info.n_rows,
                           .n_layers = table->info.n_layers,
                           .n_kv_heads = table->info.n_kv_heads,
                           .prune_ratio = table->prune_ratio,
                           .ratio = table->ratio,
                           .std = table->std,
                           .loss = table->loss,
                           .lower_bound = table->lower_bound,
                           .lambda = table->lambda,
                           .table_loss = table->table_loss,
                           .effective_ratio = table->effective,
                           .saturated = table->saturated,
                           .formats = table->formats,
                           .ranking = table->ranking ? ranking : NULL,
                           .metadata = metadata};
}

// ---- Weights of texts ----

static bool read_row(double *weight, const cJSON *row, uint32_t n_texts, double cap)
{
    const cJSON *item;
    uint32_t n = 0;
    double sum = 0;
    if (!cJSON_IsArray(row)) return false;
    cJSON_ArrayForEach(item, row)
    {
        if (n == n_texts || !cJSON_IsNumber(item)) return false;
        double value = item->valuedouble;
        if (!(value >= 0 && value <= cap * (1 + 1e-9))) return false;
        sum += weight[n++] = value;
    }
    return n == n_texts && fabs(sum - 1) <= 1e-9;
}

kvb_status table_weights_parse(double *weight, const char *text, uint32_t n_rows, uint32_t n_texts, double cap,
                               const char *name, kvb_error *err)
{
    cJSON *rows = text ? kvb_json_parse(text, strlen(text), NULL, NULL) : NULL;
    const cJSON *row = cJSON_IsArray(rows) ? rows->child : NULL;
    uint32_t r = 0;
    for (; r < n_rows && row && read_row(weight + (size_t)r * n_texts, row, n_texts, cap); r++) row = row->next;
    bool whole = r == n_rows && !row;
    cJSON_Delete(rows);
    if (whole) return KVB_OK;
    return kvb_fail(err, KVB_FORMAT,
                    "%.160s: metadata \"text_weights\": row %u: expected %u rows of %u numbers from 0 to %.4g with the "
                    "sum 1; solve the record again",
                    name, r, n_rows, n_texts, cap);
}

char *table_weights_print(const double *weight, uint32_t n_rows, uint32_t n_texts)
{
    cJSON *rows = cJSON_CreateArray();
    for (uint32_t r = 0; r < n_rows; r++)
        cJSON_AddItemToArray(rows, cJSON_CreateDoubleArray(weight + (size_t)r * n_texts, (int)n_texts));
    char *text = cJSON_PrintUnformatted(rows);
    cJSON_Delete(rows);
    return text;
}
