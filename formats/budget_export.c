#include "budget_export.h"
#include "formats/atomic_file.h"
#include "json_file.h"
#include "npy.h"
#include "runtime/fail.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- What several share ---------------------------------------------------------------------------------------------

static uint64_t layer_total(const budget_export *b, uint32_t layer)
{
    uint32_t n = kvb_table_info(b->table)->n_kv_heads;
    uint64_t total = 0;
    for (uint32_t g = 0; g < n; g++) total += b->keep[(size_t)layer * n + g];
    return total;
}

// What a layer keeps when all its heads keep the same, whole pages with b->block; 1 to T, or the end of its page.
static uint32_t layer_tokens(const budget_export *b, uint32_t layer)
{
    uint32_t n = kvb_table_info(b->table)->n_kv_heads, block = b->block ? b->block : 1;
    uint64_t mean = (2 * layer_total(b, layer) + n) / (2 * (uint64_t)n), pages = (mean + block - 1) / block;
    uint64_t tokens = pages ? pages * block : block;
    return (uint32_t)(tokens < UINT32_MAX ? tokens : mean);
}

// Where the numbers come from, for people: what the formats themselves have no place for.
static cJSON *provenance(const budget_export *b)
{
    const kvb_info *info = kvb_table_info(b->table);
    cJSON *o = cJSON_CreateObject();
    bool ok = o && cJSON_AddStringToObject(o, "table", b->table_path) &&
              cJSON_AddStringToObject(o, "metric", info->metric) &&
              cJSON_AddStringToObject(o, "model_id", info->model_id) &&
              cJSON_AddStringToObject(o, "model_sha256", info->model_sha256) && json_add_exact(o, "ratio", b->ratio) &&
              cJSON_AddNumberToObject(o, "n_tokens", b->n_tokens) &&
              cJSON_AddNumberToObject(o, "block", b->block ? b->block : 1) &&
              cJSON_AddNumberToObject(o, "budgets_version", kvb_budgets_version());
    if (ok) return o;
    cJSON_Delete(o);
    return NULL;
}

// Takes `value`, NULL where memory ran out for it.
static bool add(cJSON *object, const char *name, cJSON *value)
{
    if (value && object && cJSON_AddItemToObject(object, name, value)) return true;
    cJSON_Delete(value);
    return false;
}

// Writes what is in memory of `text`, and frees it. ok: whether all of it could be made.
static kvb_status write_text(const char *path, FILE *to, char **text, const size_t *size, bool ok, kvb_error *err)
{
    ok = fclose(to) == 0 && ok;
    kvb_status status =
        ok ? atomic_write(path, *text, *size, err) : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
    free(*text);
    return status;
}

typedef struct text_file {
    char *text;
    size_t size;
    FILE *to;
} text_file;

static kvb_status text_begin(text_file *f, const char *path, kvb_error *err)
{
    *f = (text_file){0};
    f->to = open_memstream(&f->text, &f->size);
    return f->to ? KVB_OK : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
}

// FOLDER/NAME, malloc'd.
static kvb_status path_in(char **out, const char *folder, const char *name, kvb_error *err)
{
    if (asprintf(out, "%s/%s", folder, name) >= 0) return KVB_OK;
    *out = NULL;
    return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", folder);
}

static kvb_status write_json_in(const char *folder, const char *name, const cJSON *value, kvb_error *err)
{
    char *path;
    kvb_status status = path_in(&path, folder, name, err);
    if (status == KVB_OK) status = json_write(path, value, err);
    free(path);
    return status;
}

// ---- DuoAttention ---------------------------------------------------------------------------------------------------

// Heads that keep under half: how many, and the mean of what they keep.
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
    bool ok =
        o && cJSON_AddStringToObject(o, "model_name", info->model_id) &&
        cJSON_AddNumberToObject(o, "sink_size", info->sink) && cJSON_AddNumberToObject(o, "recent_size", recent) &&
        json_add_exact(o, "head_compression_ratio", n_streaming / heads) &&
        json_add_exact(o, "effective_ratio", 1 - kept / (heads * b->n_tokens)) && add(o, "kvbudget", provenance(b));
    if (ok) return o;
    cJSON_Delete(o);
    return NULL;
}

static kvb_status write_shares(const budget_export *b, const char *folder, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    char *path;
    text_file f;
    kvb_status status = path_in(&path, folder, "full_attention_heads.tsv", err);
    if (status == KVB_OK) status = text_begin(&f, path, err);
    if (status == KVB_OK) {
        bool ok = true;
        for (uint32_t l = 0; l < info->n_layers; l++)
            for (uint32_t g = 0; g < info->n_kv_heads && ok; g++)
                ok = fprintf(f.to, "%.9g%c", (double)b->keep[(size_t)l * info->n_kv_heads + g] / b->n_tokens,
                             g + 1 < info->n_kv_heads ? '\t' : '\n') > 0;
        status = write_text(path, f.to, &f.text, &f.size, ok, err);
    }
    free(path);
    return status;
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

kvb_status export_per_layer(const budget_export *b, const char *path, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    cJSON *o = cJSON_CreateObject(), *tokens = cJSON_CreateArray(), *ratios = cJSON_CreateArray();
    bool ok = o && tokens && ratios;
    for (uint32_t l = 0; l < info->n_layers && ok; l++) {
        double n = fmin(layer_tokens(b, l), b->n_tokens);
        // kvpress keeps floor((1 - r) T): half a token more, so that no rounding of r can take one away.
        cJSON *count = cJSON_CreateNumber(n), *ratio = json_exact(fmax(0, 1 - (n + 0.5) / b->n_tokens));
        ok = count && ratio && cJSON_AddItemToArray(tokens, count) && cJSON_AddItemToArray(ratios, ratio);
    }
    ok = add(o, "tokens", tokens) & add(o, "compression_ratios", ratios) && ok;
    ok = ok && cJSON_AddNumberToObject(o, "sink", info->sink) && add(o, "kvbudget", provenance(b));
    kvb_status status = json_write(path, ok ? o : NULL, err);
    cJSON_Delete(o);
    return status;
}

kvb_status export_tensorrt_llm(const budget_export *b, const char *path, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    text_file f;
    kvb_status status = text_begin(&f, path, err);
    if (status != KVB_OK) return status;
    bool ok = fprintf(f.to,
                      "# %s, ratio %.10g of %u tokens, by kvbudget export. Layers keep their latest tokens and the "
                      "sinks.\nkv_cache_config:\n  max_attention_window: [",
                      info->metric, b->ratio, b->n_tokens) > 0;
    for (uint32_t l = 0; l < info->n_layers && ok; l++)
        ok = fprintf(f.to, "%s%u", l ? ", " : "", layer_tokens(b, l)) > 0;
    ok = ok && fprintf(f.to, "]\n  sink_token_length: %u\n", info->sink) > 0;
    return write_text(path, f.to, &f.text, &f.size, ok, err);
}

// ---- HeadKV ---------------------------------------------------------------------------------------------------------

kvb_status export_headkv(const budget_export *b, const char *path, uint32_t *capacity, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(b->table);
    uint32_t group = info->n_heads / info->n_kv_heads;
    uint64_t sum = 0, heads = (uint64_t)info->n_layers * info->n_kv_heads;
    text_file f;
    kvb_status status = text_begin(&f, path, err);
    if (status != KVB_OK) return status;
    bool ok = fputc('{', f.to) != EOF;
    for (uint32_t l = 0; l < info->n_layers; l++) {
        for (uint32_t h = 0; h < info->n_heads && ok; h++) {
            uint32_t keep = b->keep[(size_t)l * info->n_kv_heads + h / group];
            uint32_t score = keep > info->window ? keep - info->window : 0;
            ok = fprintf(f.to, "%s\"%u-%u\": [%u]", l || h ? ", " : "", l, h, score) > 0;
            if (h % group == 0) sum += score;
        }
    }
    ok = ok && fputs("}\n", f.to) != EOF;
    *capacity = (uint32_t)((2 * sum + heads) / (2 * heads));
    return write_text(path, f.to, &f.text, &f.size, ok, err);
}

// ---- Lengths, cu_seqlens, block tables ------------------------------------------------------------------------------

static kvb_status write_array_in(const char *folder, const char *name, uint32_t n_dims, const uint64_t *shape,
                                 const void *data, kvb_error *err)
{
    char *path;
    kvb_status status = path_in(&path, folder, name, err);
    if (status == KVB_OK) status = npy_write(path, NPY_I32, n_dims, shape, data, err);
    free(path);
    return status;
}

// [L,G+1] of every layer, in rows or in pages.
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
    int32_t *table = malloc(layers * n * most * sizeof *table);
    if (!table) return kvb_fail(err, KVB_MEMORY, "%s: no memory for %zu pages", folder, layers * n * most);
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
    int32_t *cu = malloc(layers * (n + 1) * sizeof *cu);
    if (!cu) return kvb_fail(err, KVB_MEMORY, "%s: no memory for %zu offsets", folder, layers * (n + 1));
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
    cJSON *about = provenance(b);
    status = write_varlen(b, folder.temp_path, err);
    if (status == KVB_OK) status = write_json_in(folder.temp_path, "kvbudget.json", about, err);
    cJSON_Delete(about);
    return atomic_folder_end(&folder, status, err);
}
