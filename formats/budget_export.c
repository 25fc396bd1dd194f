#include "budget_export.h"
#include "formats/atomic_file.h"
#include "json_file.h"
#include "need.h"
#include "npy.h"
#include "runtime/budgets_round.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// ---- What several share ---------------------------------------------------------------------------------------------

// Adds where the numbers come from, for human readers: the formats themselves have no place for it.
static void add_provenance(cJSON *to, const budget_export *b)
{
    const kvb_info *info = kvb_table_info(b->table);
    json_put(to, "table %s metric %s model_id %s model_sha256 %s", b->table_path, info->metric, info->model_id,
             info->model_sha256);
    json_add_exact(to, "ratio", b->ratio);
    json_put(to, "n_tokens %u block %u budgets_version %u", b->n_tokens, b->block ? b->block : 1,
             kvb_budgets_version());
}

static kvb_status write_json_in(const char *folder, const char *name, const cJSON *value, kvb_error *err)
{
    char *path = need_text("%s/%s", folder, name);
    kvb_status status = json_write(path, value, err);
    free(path);
    return status;
}

// ---- DuoAttention ---------------------------------------------------------------------------------------------------

// Counts the heads that keep less than half of T; *mean is the mean of what they keep.
static uint32_t streaming_heads(const budget_export *b, double *mean)
{
    const kvb_info *info = kvb_table_info(b->table);
    uint32_t n = 0;
    double sum = 0;
    for (size_t h = 0; h < (size_t)info->n_layers * info->n_kv_heads; h++) {
        if (2 * (uint64_t)b->keep[h] >= b->n_tokens) continue;
        sum += b->keep[h];
        n++;
    }
    *mean = n ? sum / n : 0;
    return n;
}

static cJSON *duo_config(const budget_export *b)
{
    const kvb_info *info = kvb_table_info(b->table);
    double mean, heads = (double)info->n_layers * info->n_kv_heads;
    uint32_t n_streaming = streaming_heads(b, &mean);
    double recent = fmax(fmax(rint(mean) - info->sink, info->window), 1);
    double kept = (heads - n_streaming) * b->n_tokens + n_streaming * fmin(info->sink + recent, b->n_tokens);
    cJSON *o = cJSON_CreateObject();
    json_put(o, "model_name %s sink_size %u recent_size %g", info->model_id, info->sink, recent);
    json_add_exact(o, "head_compression_ratio", n_streaming / heads);
    json_add_exact(o, "effective_ratio", 1 - kept / (heads * b->n_tokens));
    add_provenance(cJSON_AddObjectToObject(o, "kvbudget"), b);
    return o;
}

static kvb_status write_shares(const budget_export *b, const char *folder, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    char *path = need_text("%s/full_attention_heads.tsv", folder);
    atomic_file f;
    kvb_status status = atomic_file_begin(&f, path, err);
    free(path);
    if (status != KVB_OK) return status;
    for (size_t h = 0; h < (size_t)info->n_layers * info->n_kv_heads; h++)
        fprintf(f.stream, "%.9g%c", (double)b->keep[h] / b->n_tokens,
                h % info->n_kv_heads + 1 < info->n_kv_heads ? '\t' : '\n');
    return atomic_file_commit(&f, err); // finds what went wrong with the stream
}

kvb_status export_duo(const budget_export *b, const char *path, kvb_error *err)
{
    atomic_folder folder;
    kvb_status status = atomic_folder_begin(&folder, path, err);
    if (status != KVB_OK) return status;
    cJSON *config = duo_config(b);
    status = write_shares(b, folder.temp_path, err);
    if (status == KVB_OK) status = write_json_in(folder.temp_path, "config.json", config, err);
    cJSON_Delete(config);
    return atomic_folder_end(&folder, status, err);
}

// ---- One length per layer -------------------------------------------------------------------------------------------

// Computes what each layer keeps when all its heads keep the same, tokens [L]: the mean of its heads, rounded to whole
// tokens, or pages with b->block, so that the total over the layers stays the same. Layers without a budget keep
// everything. Returns the share that is then pruned.
static double layer_tokens(const budget_export *b, uint32_t *tokens)
{
    const kvb_info *info = kvb_table_info(b->table);
    size_t heads = info->n_kv_heads, n = 0;
    double *prune = need(info->n_layers, sizeof *prune, "layers");
    uint32_t *rounded = need(info->n_layers, sizeof *rounded, "layers");
    uint64_t total = 0;
    for (size_t l = 0; l < info->n_layers; l++) {
        double sum = 0;
        for (size_t g = 0; g < heads; g++) sum += b->keep[l * heads + g];
        if (!info->bounded || !info->bounded[l]) prune[n++] = 1 - sum / ((double)heads * b->n_tokens);
    }
    const kvb_mix means = {.below = prune, .above = prune};
    kvb_round_global(&means, n, b->n_tokens, rounded);
    if (b->block > 1) kvb_round_blocks(rounded, n, b->n_tokens, b->block, 1);
    for (size_t i = 0; i < n; i++) total += rounded[i];
    for (size_t l = info->n_layers; l-- > 0;)
        tokens[l] = info->bounded && info->bounded[l] ? b->n_tokens : rounded[--n];
    free_all(prune, rounded);
    return 1 - (double)total / ((double)info->n_budgeted * b->n_tokens);
}

kvb_status export_per_layer(const budget_export *b, const char *path, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    uint32_t *kept = need(info->n_layers, sizeof *kept, "layers");
    double effective = layer_tokens(b, kept);
    cJSON *o = cJSON_CreateObject(), *tokens = cJSON_AddArrayToObject(o, "tokens"),
          *ratios = cJSON_AddArrayToObject(o, "compression_ratios");
    for (uint32_t l = 0; l < info->n_layers; l++) {
        cJSON_AddItemToArray(tokens, cJSON_CreateNumber(kept[l]));
        // kvpress keeps floor((1 - r) T): half a token more, so that no rounding of r can take a token away.
        cJSON_AddItemToArray(ratios, json_exact(fmax(0, 1 - (kept[l] + 0.5) / b->n_tokens)));
    }
    cJSON_AddNumberToObject(o, "sink", info->sink);
    json_add_exact(o, "effective_ratio", effective);
    add_provenance(cJSON_AddObjectToObject(o, "kvbudget"), b);
    free(kept);
    kvb_status status = json_write(path, o, err);
    cJSON_Delete(o);
    return status;
}

// ---- Shares of all heads --------------------------------------------------------------------------------------------

kvb_status export_shares(const budget_export *b, const char *path, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    double total = 0;
    cJSON *o = cJSON_CreateObject();
    for (int writing = 0; writing < 2; writing++)
        for (uint32_t h = 0; h < info->n_layers * info->n_kv_heads; h++) {
            char name[32];
            uint32_t layer = h / info->n_kv_heads;
            if (info->bounded && info->bounded[layer]) continue;
            snprintf(name, sizeof name, "L%uH%u", layer, h % info->n_kv_heads);
            // Readers round down, so shares are a trillionth larger: then rounding errors take no token away.
            if (writing) json_add_exact(o, name, b->keep[h] / total * (1 + 1e-12));
            else total += b->keep[h];
        }
    kvb_status status = json_write(path, o, err);
    cJSON_Delete(o);
    return status;
}

// ---- Lengths, cu_seqlens, block tables ------------------------------------------------------------------------------

static kvb_status write_array_in(const char *folder, const char *name, uint32_t n_dims, const uint64_t *shape,
                                 const void *data, kvb_error *err)
{
    char *path = need_text("%s/%s", folder, name);
    kvb_status status = npy_write(path, NPY_I32, n_dims, shape, data, err);
    free(path);
    return status;
}

// Fills cu [L,G+1], the offsets of every layer, in rows or in pages.
static kvb_status fill_offsets(int32_t *cu, const budget_export *b, uint32_t block, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    size_t n = info->n_kv_heads;
    kvb_status status = KVB_OK;
    for (uint32_t l = 0; l < info->n_layers && status == KVB_OK; l++)
        status = kvb_cu_seqlens(b->keep + l * n, n, 0, block, cu + l * (n + 1), n + 1, err);
    return status;
}

static kvb_status write_pages(const budget_export *b, const char *folder, const int32_t *indptr, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    size_t n = info->n_kv_heads, layers = info->n_layers, most = (b->n_tokens + (size_t)b->block - 1) / b->block, cells;
    if (__builtin_mul_overflow(layers * n, most, &cells) || cells > SIZE_MAX / sizeof(int32_t))
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: %zu heads of %zu pages are too many", folder, layers * n, most);
    most = 0;
    for (size_t i = 0; i < layers * (n + 1) - 1; i++)
        if (indptr[i + 1] > indptr[i] && (size_t)(indptr[i + 1] - indptr[i]) > most)
            most = (size_t)(indptr[i + 1] - indptr[i]);
    int32_t *table = need(layers * n * most, sizeof *table, "pages of a block table");
    for (size_t l = 0; l < layers; l++)
        for (size_t g = 0; g < n; g++) {
            int32_t first = indptr[l * (n + 1) + g], end = indptr[l * (n + 1) + g + 1];
            for (size_t i = 0; i < most; i++) {
                int32_t page = first + (int32_t)i;
                table[(l * n + g) * most + i] = page < end ? page : -1;
            }
        }
    kvb_status status = write_array_in(folder, "page_indptr.npy", 2, (uint64_t[]){layers, n + 1}, indptr, err);
    if (status == KVB_OK)
        status = write_array_in(folder, "block_table.npy", 3, (uint64_t[]){layers, n, most}, table, err);
    free(table);
    return status;
}

static kvb_status write_varlen(const budget_export *b, const char *folder, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    size_t n = info->n_kv_heads, layers = info->n_layers;
    int32_t *cu = need(layers * (n + 1), sizeof *cu, "offsets");
    // The lengths are at most the ends that were counted here, so they fit too.
    kvb_status status = fill_offsets(cu, b, 1, err);
    if (status == KVB_OK) status = write_array_in(folder, "lengths.npy", 2, (uint64_t[]){layers, n}, b->keep, err);
    if (status == KVB_OK) status = write_array_in(folder, "cu_seqlens.npy", 2, (uint64_t[]){layers, n + 1}, cu, err);
    if (status == KVB_OK && b->block > 1) {
        status = fill_offsets(cu, b, b->block, err);
        if (status == KVB_OK) status = write_pages(b, folder, cu, err);
    }
    free(cu);
    return status;
}

kvb_status export_varlen(const budget_export *b, const char *path, kvb_error *err)
{
    atomic_folder folder;
    kvb_status status = atomic_folder_begin(&folder, path, err);
    if (status != KVB_OK) return status;
    cJSON *about = cJSON_CreateObject();
    add_provenance(about, b);
    status = write_varlen(b, folder.temp_path, err);
    if (status == KVB_OK) status = write_json_in(folder.temp_path, "kvbudget.json", about, err);
    cJSON_Delete(about);
    return atomic_folder_end(&folder, status, err);
}
