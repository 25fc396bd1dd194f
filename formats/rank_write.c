#include "formats/rank_write.h"
#include "formats/atomic_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "runtime/rank.h"
#include "runtime/sha256.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

tensor_entry rank_tensor(const rank_content *r)
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

static cJSON *whole_metadata(const rank_content *r, const cJSON *metadata)
{
    cJSON *all = cJSON_Duplicate(metadata, 1);
    if (all && cJSON_AddStringToObject(all, "format", "kvbudget-rank") &&
        cJSON_AddStringToObject(all, "format_version", "1") && cJSON_AddStringToObject(all, "ranking", r->about))
        return all;
    cJSON_Delete(all);
    return NULL;
}

kvb_status rank_write(const char *path, const rank_content *r, const cJSON *metadata, kvb_error *err)
{
    unsigned char *bytes = NULL;
    size_t size;
    kvb_ranking *back = NULL;
    const tensor_entry weights = rank_tensor(r);
    cJSON *all = whole_metadata(r, metadata);
    if (!all) return kvb_fail(err, KVB_MEMORY, "%s: no memory for the metadata", path);
    kvb_status status = tensor_file_make(&bytes, &size, &weights, 1, all, err);
    if (status == KVB_OK) status = kvb_ranking_open_memory(&back, bytes, size, path, err);
    kvb_ranking_close(back);
    if (status == KVB_OK) status = atomic_write(path, bytes, size, err);
    free(bytes);
    cJSON_Delete(all);
    return status;
}
