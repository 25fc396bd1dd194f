#include "study/refine_table.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/table_export.h"
#include <stdlib.h>

kvb_status refine_table_open(refine_table *t, const kvb_table *table, const char *path, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(table);
    cJSON *metadata = NULL;
    *t = (refine_table){0};
    kvb_status status = table_metadata_read(&metadata, path, err);
    t->content = table_content_of(table, metadata, &t->ranking);
    if (status == KVB_OK) status = study_options_from_table(&t->options, &t->limits, table, path, err);
    bool by_layer = t->options.scope == SCOPE_LAYER || (t->options.limits && t->limits.by_layer);
    t->base = (shift_base){info->n_rows,           info->n_layers,    info->n_kv_heads, t->content.ratio,
                           t->content.prune_ratio, t->options.limits, by_layer};
    return status;
}

void refine_table_free(refine_table *t)
{
    cJSON_Delete((cJSON *)(uintptr_t)t->content.metadata); // const in table_content, but owned by *t
    kvb_limits_free(&t->limits);
    *t = (refine_table){0};
}

// Makes the shifted content. *numbers, which the caller frees, holds its prune ratios and their means.
static kvb_status shift_content(const refine_table *t, const double *knots, uint32_t n_knots, const double *shift,
                                table_content *out, double **numbers, kvb_error *err)
{
    size_t R = t->content.n_rows, n = (size_t)t->content.n_layers * t->content.n_kv_heads;
    double *prune = *numbers = need(R * (n + 1), sizeof *prune, "numbers of a table");
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
    free_all(bytes, numbers);
    return status;
}

kvb_status refine_table_write(const refine_table *t, const double *knots, uint32_t n_knots, const double *shift,
                              const cJSON *about, const char *path, kvb_error *err)
{
    table_content content;
    double *numbers;
    kvb_status status = shift_content(t, knots, n_knots, shift, &content, &numbers, err);
    cJSON *metadata = cJSON_Duplicate(t->content.metadata, true);
    cJSON_DeleteItemFromObjectCaseSensitive(metadata, "refined"); // of an earlier refinement
    cJSON_DeleteItemFromObjectCaseSensitive(metadata, "unknown");
    char *text = cJSON_PrintUnformatted(about);
    json_put(metadata, "refined %s unknown %s", text, "table_loss");
    content.metadata = metadata;
    if (status == KVB_OK) status = table_write(path, &content, err);
    cJSON_free(text);
    cJSON_Delete(metadata);
    free(numbers);
    return status;
}
