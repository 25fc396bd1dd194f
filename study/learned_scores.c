#include "study/learned_scores.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include "study/layer_map.h"
#include <endian.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

kvb_status context_sha256(const selection *s, size_t k, char out[65], kvb_error *err)
{
    uint32_t T = selection_context(s, k)->n_tokens;
    int32_t *ids = need(T, sizeof *ids, "token ids");
    kvb_status status = record_read_tokens(s->r, s->contexts[k], ids, err);
    for (uint32_t j = 0; j < T && status == KVB_OK; j++) ids[j] = (int32_t)htole32((uint32_t)ids[j]);
    if (status == KVB_OK) sha256_hex(ids, T * sizeof *ids, out);
    free(ids);
    return status;
}

// Is the ranking of the record's model? It has weights for all of its layers, the record scores of those that count.
static kvb_status check_model(const selection *s, const kvb_ranking *r, kvb_error *err)
{
    layer_map layers;
    const kvb_ranking_info *info = &r->info;
    const char *model = record_text(s->r, "model_sha256");
    kvb_status status = layer_map_read(&layers, s->r, err);
    bool fits = info->n_layers == layers.n_layers && info->n_kv_heads == record_get_shape(s->r).n_kv_heads;
    layer_map_free(&layers);
    if (status != KVB_OK) return status;
    if (fits && (!*model || !*info->model_sha256 || strcasecmp(model, info->model_sha256) == 0)) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: the ranking %s, of %u layers x %u KV heads, is of another model; fit one on this record "
                    "(kvbudget learn)",
                    s->path, info->name, info->n_layers, info->n_kv_heads);
}

kvb_status learned_scores_check(const selection *s, const kvb_ranking *r, kvb_error *err)
{
    const kvb_ranking_info *info = &r->info;
    kvb_status status = check_model(s, r, err);
    if (status != KVB_OK) return status;
    for (size_t k = 0; k < s->n_contexts; k++) {
        const record_context_info *c = selection_context(s, k);
        for (uint32_t f = 0; f < info->n_features && !record_has_metric(c, info->name); f++)
            if (!record_has_metric(c, info->metrics[f]))
                return kvb_fail(err, KVB_MISMATCH,
                                "%s: context %s has no scores of %s, which the ranking %s takes; profile with --metric "
                                "%s",
                                s->path, c->id, info->metrics[f], info->name, info->metrics[f]);
    }
    return KVB_OK;
}

// features [F][L,G,T], L the layers of the record.
static kvb_status rank_heads(const kvb_ranking *r, const layer_map *layers, uint32_t fold, const float *features,
                             uint32_t T, float *out, kvb_error *err)
{
    size_t heads = (size_t)r->info.n_kv_heads * T, place = 0, L = layers->n_budgeted;
    kvb_status status = KVB_OK;
    for (uint32_t l = 0; l < layers->n_layers && status == KVB_OK; l++) {
        const float *of_layer[KVB_RANK_FEATURES_MAX];
        if (layers->bounded && layers->bounded[l]) continue;
        for (uint32_t f = 0; f < r->info.n_features; f++) of_layer[f] = features + (f * L + place) * heads;
        status = kvb_rank_layer_fold(r, fold, l, of_layer, T, out + place * heads, err);
        place++;
    }
    return status;
}

kvb_status learned_scores_read(const selection *s, size_t k, const kvb_ranking *r, float *out, kvb_error *err)
{
    char sha256[65];
    const record_context_info *c = selection_context(s, k);
    kvb_status status = context_sha256(s, k, sha256, err);
    if (status != KVB_OK) return status;
    uint32_t fold = kvb_ranking_fold(r, sha256), F = r->info.n_features;
    if (fold == 0 && record_has_metric(c, r->info.name))
        return record_read_scores(s->r, s->contexts[k], r->info.name, out, err);
    layer_map layers;
    status = layer_map_read(&layers, s->r, err);
    size_t numbers = (size_t)layers.n_budgeted * r->info.n_kv_heads * c->n_tokens;
    float *features = need(F * numbers, sizeof *features, "scores");
    for (uint32_t f = 0; f < F && status == KVB_OK; f++)
        status = record_read_scores(s->r, s->contexts[k], r->info.metrics[f], features + f * numbers, err);
    if (status == KVB_OK) status = rank_heads(r, &layers, fold, features, c->n_tokens, out, err);
    layer_map_free(&layers);
    free(features);
    return status;
}
