#include "study/refine_table.h"
#include "formats/table_export.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// Where each array of R numbers begins in `numbers`; std [R, N] and prune ratios [R, N] follow.
enum { RATIO, LOSS, BOUND, LAMBDA, TABLE_LOSS, EFFECTIVE, COLUMNS };

static kvb_status copy_rows(refine_table *t, const kvb_table *table, uint8_t *saturated, kvb_error *err)
{
    uint32_t R = t->content.n_rows;
    size_t n = (size_t)t->content.n_layers * t->content.n_kv_heads;
    double *std = t->numbers + (size_t)COLUMNS * R;
    for (uint32_t r = 0; r < R; r++) {
        kvb_row row;
        kvb_status status = kvb_table_row(table, r, &row, err);
        if (status != KVB_OK) return status;
        const double values[COLUMNS] = {row.ratio,  row.loss,       row.lower_bound,
                                        row.lambda, row.table_loss, row.effective_ratio};
        for (int i = 0; i < COLUMNS; i++) t->numbers[(size_t)i * R + r] = values[i];
        memcpy(std + r * n, row.std, n * sizeof *std);
        memcpy(std + (R + r) * n, row.prune_ratio, n * sizeof *std);
        saturated[r] = row.saturated != 0;
    }
    return KVB_OK;
}

kvb_status refine_table_open(refine_table *t, const kvb_table *table, const char *path, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(table);
    size_t R = info->n_rows, n = (size_t)info->n_layers * info->n_kv_heads;
    double *at = malloc(R * (COLUMNS + 2 * n) * sizeof *at);
    uint8_t *saturated = calloc(R, 1);
    *t = (refine_table){.numbers = at, .content = {.saturated = saturated}};
    if (!at || !saturated) return kvb_fail(err, KVB_MEMORY, "%s: no memory for a copy", path);
    t->content = (table_content){.n_rows = info->n_rows,
                                 .n_layers = info->n_layers,
                                 .n_kv_heads = info->n_kv_heads,
                                 .prune_ratio = at + R * (COLUMNS + n),
                                 .ratio = at + RATIO * R,
                                 .std = at + COLUMNS * R,
                                 .loss = at + LOSS * R,
                                 .lower_bound = at + BOUND * R,
                                 .lambda = at + LAMBDA * R,
                                 .table_loss = at + TABLE_LOSS * R,
                                 .effective_ratio = at + EFFECTIVE * R,
                                 .saturated = saturated};
    cJSON *metadata = NULL;
    if (kvb_table_ranking(table)) t->ranking = rank_content_of(kvb_table_ranking(table));
    if (kvb_table_ranking(table)) t->content.ranking = &t->ranking;
    kvb_status status = copy_rows(t, table, saturated, err);
    if (status == KVB_OK) status = table_metadata_read(&metadata, path, err);
    t->content.metadata = metadata;
    if (status == KVB_OK) status = study_options_from_table(&t->options, &t->limits, table, path, err);
    bool by_layer = t->options.scope == SCOPE_LAYER || (t->options.limits && t->limits.by_layer);
    t->base = (shift_base){info->n_rows,           info->n_layers,    info->n_kv_heads, t->content.ratio,
                           t->content.prune_ratio, t->options.limits, by_layer};
    return status;
}

void refine_table_free(refine_table *t)
{
    free(t->numbers);
    free((void *)(uintptr_t)t->content.saturated); // the content's arrays are const, and these are ours
    cJSON_Delete((cJSON *)(uintptr_t)t->content.metadata);
    kvb_limits_free(&t->limits);
    *t = (refine_table){0};
}

// The shifted content: *numbers (malloc'd) holds its prune ratios and their means.
static kvb_status shift_content(const refine_table *t, const double *knots, uint32_t n_knots, const double *shift,
                                table_content *out, double **numbers, kvb_error *err)
{
    size_t R = t->content.n_rows, n = (size_t)t->content.n_layers * t->content.n_kv_heads;
    double *prune = *numbers = malloc(R * (n + 1) * sizeof *prune);
    if (!prune) return kvb_fail(err, KVB_MEMORY, "no memory for %zu rows", R);
    double *mean = prune + R * n;
    kvb_status status = shift_table(&t->base, knots, n_knots, shift, prune, err);
    if (status != KVB_OK) return status;
    for (size_t r = 0; r < R; r++) {
        mean[r] = 0;
        for (size_t h = 0; h < n; h++) mean[r] += prune[r * n + h] / (double)n;
    }
    *out = t->content;
    out->prune_ratio = prune;
    out->effective_ratio = mean;
    return KVB_OK;
}

kvb_status refine_table_apply(const refine_table *t, const double *knots, uint32_t n_knots, const double *shift,
                              kvb_table **out, kvb_error *err)
{
    table_content content;
    double *numbers;
    unsigned char *bytes = NULL;
    size_t size;
    *out = NULL;
    kvb_status status = shift_content(t, knots, n_knots, shift, &content, &numbers, err);
    if (status == KVB_OK) status = table_serialize(&bytes, &size, &content, err);
    if (status == KVB_OK) status = kvb_table_open_memory(out, bytes, size, "refined table", NULL, err);
    free(bytes);
    free(numbers);
    return status;
}

kvb_status refine_table_write(const refine_table *t, const double *knots, uint32_t n_knots, const double *shift,
                              const char *refined, const char *path, kvb_error *err)
{
    table_content content;
    double *numbers;
    kvb_status status = shift_content(t, knots, n_knots, shift, &content, &numbers, err);
    cJSON *metadata = status == KVB_OK ? cJSON_Duplicate(t->content.metadata, true) : NULL;
    cJSON_DeleteItemFromObjectCaseSensitive(metadata, "refined"); // of an earlier refinement
    cJSON_DeleteItemFromObjectCaseSensitive(metadata, "unknown");
    if (status == KVB_OK && !(metadata && cJSON_AddStringToObject(metadata, "refined", refined) &&
                              cJSON_AddStringToObject(metadata, "unknown", "table_loss")))
        status = kvb_fail(err, KVB_MEMORY, "%s: no memory for the table's metadata", path);
    content.metadata = metadata;
    if (status == KVB_OK) status = table_write(path, &content, err);
    cJSON_Delete(metadata);
    free(numbers);
    return status;
}
