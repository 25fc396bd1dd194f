#include "table_write.h"
#include "atomic_file.h"
#include "runtime/fail.h"
#include "runtime/table.h"
#include "tensor_file.h"
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { N_TENSORS = 10, N_TABLE = 9 }; // with that of a ranking

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
    return KVB_OK;
}

// ---- Checks ----

static kvb_status check_numbers(const table_content *t, const tensor_entry *tensors, size_t n, kvb_error *err)
{
    for (size_t k = 0; k < n; k++) {
        const tensor_entry *x = &tensors[k];
        for (size_t i = 0; i < tensor_count(x); i++) {
            if (x->f64 && !isfinite(x->f64[i]))
                return kvb_fail(err, KVB_NUMERIC, "table: %s: element %zu is %g", x->name, i, x->f64[i]);
            if (x->u8 && x->u8[i] > 1)
                return kvb_fail(err, KVB_ARGUMENT, "table: %s: element %zu is %u, expected 0 or 1", x->name, i,
                                x->u8[i]);
        }
    }
    for (size_t i = 0; i < tensor_count(&tensors[0]); i++) {
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

kvb_status table_serialize(unsigned char **out, size_t *size, const table_content *t, kvb_error *err)
{
    *out = NULL;
    tensor_entry tensors[N_TENSORS];
    size_t n = 0;
    kvb_status status = list_tensors(tensors, &n, t, err);
    if (status == KVB_OK) status = check_numbers(t, tensors, n, err);
    if (status == KVB_OK) status = check_metadata(t->metadata, err);
    return status == KVB_OK ? tensor_file_make(out, size, tensors, n, t->metadata, err) : status;
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
                           .ranking = table->ranking ? ranking : NULL,
                           .metadata = metadata};
}
