// Versions, and everything that only looks at an open table.
#include "kvbudget.h"
#include "fail.h"
#include "safetensors.h"
#include "table.h"
#include <string.h>

#ifndef KVBUDGET_VERSION // the Makefile passes it; a copied folder is built without
#define KVBUDGET_VERSION "0.1.0"
#endif

const char *kvb_version(void)
{
    return KVBUDGET_VERSION;
}

uint32_t kvb_budgets_version(void)
{
    return KVB_BUDGETS_VERSION;
}

const kvb_info *kvb_table_info(const kvb_table *table)
{
    return table ? &table->info : NULL;
}

const char *kvb_table_metadata(const kvb_table *table, const char *key)
{
    return table && key ? kvb_safetensors_metadata(table->header, key) : NULL;
}

const double *kvb_table_prune_ratios(const kvb_table *table)
{
    return table ? table->prune_ratio : NULL;
}

const double *kvb_table_budgeted_ratios(const kvb_table *table)
{
    return table ? table->budgeted : NULL;
}

kvb_status kvb_table_row(const kvb_table *table, uint32_t row, kvb_row *out, kvb_error *err)
{
    if (!table || !out) return kvb_fail(err, KVB_ARGUMENT, "kvb_table_row: table and out must not be NULL");
    if (row >= table->info.n_rows) {
        return kvb_fail(err, KVB_ARGUMENT, "%s: row: expected 0 to %u, found %u", table->name,
                        (unsigned)table->info.n_rows - 1, (unsigned)row);
    }
    size_t n_heads = (size_t)table->info.n_layers * table->info.n_kv_heads;
    out->ratio = table->ratio[row];
    out->effective_ratio = table->effective[row];
    out->loss = table->loss[row];
    out->lower_bound = table->lower_bound[row];
    out->lambda = table->lambda[row];
    out->table_loss = table->table_loss[row];
    out->saturated = table->saturated[row];
    out->prune_ratio = table->prune_ratio + row * n_heads;
    out->std = table->std + row * n_heads;
    return KVB_OK;
}

bool kvb_same_hash(const char *a, const char *b)
{
    for (; *a && *b; ++a, ++b) {
        int x = *a >= 'A' && *a <= 'F' ? *a - 'A' + 'a' : *a;
        int y = *b >= 'A' && *b <= 'F' ? *b - 'A' + 'a' : *b;
        if (x != y) return false;
    }
    return *a == *b;
}

static kvb_status check_numbers(const kvb_table *table, const kvb_expectation *expected, kvb_error *err)
{
    const kvb_info *info = &table->info;
    int protection = expected->has_protection != 0;
    const struct {
        const char *name;
        uint32_t expected, found;
        int wanted;
    } fields[] = {{"n_layers", expected->n_layers, info->n_layers, expected->n_layers != 0},
                  {"n_heads", expected->n_heads, info->n_heads, expected->n_heads != 0},
                  {"n_kv_heads", expected->n_kv_heads, info->n_kv_heads, expected->n_kv_heads != 0},
                  {"head_dim", expected->head_dim, info->head_dim, expected->head_dim != 0},
                  {"sink", expected->sink, info->sink, protection},
                  {"window", expected->window, info->window, protection}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (fields[i].wanted && fields[i].expected != fields[i].found) {
            return kvb_fail(err, KVB_MISMATCH, "%s: %s: expected %u, the table says %u; %s", table->name,
                            fields[i].name, (unsigned)fields[i].expected, (unsigned)fields[i].found,
                            i < 4 ? "use a table that was made for this model"
                                  : "protect what the table was made with, or solve it again");
        }
    }
    return KVB_OK;
}

kvb_status kvb_table_check(const kvb_table *table, const kvb_expectation *expected, kvb_error *err)
{
    if (!table || !expected) return kvb_fail(err, KVB_ARGUMENT, "kvb_table_check: table and expected must not be NULL");
    const kvb_info *info = &table->info;
    kvb_status status = check_numbers(table, expected, err);
    // An empty hash belongs to no weights, not even where the table leaves its own open.
    const char *hash = expected->model_sha256;
    if (!status && hash && (!*hash || !kvb_same_hash(hash, info->model_sha256))) {
        status = kvb_fail(
            err, KVB_MISMATCH, "%s: model_sha256: expected %.64s, the table says %s; it was made for other weights",
            table->name, *hash ? hash : "a hash, got none", *info->model_sha256 ? info->model_sha256 : "nothing");
    }
    if (!status && expected->metric && strcmp(expected->metric, info->metric) != 0) {
        status =
            kvb_fail(err, KVB_MISMATCH,
                     "%s: metric: expected %.64s, the table says %.64s; rank tokens by the table's metric or use a "
                     "table of yours",
                     table->name, expected->metric, info->metric);
    }
    return status;
}
