#include "study/learned_scores.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "study/layer_map.h"
#include <endian.h>
#include <stdlib.h>
#include <string.h>

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

// Computes the scores out [L,G,T] from features [F][L,G,T]; L counts the layers of the record.
static kvb_status rank_heads(const kvb_ranking *r, const layer_map *layers, uint32_t fold, const float *features,
                             uint32_t T, float *out, kvb_error *err)
{
    uint32_t G = r->info.n_kv_heads;
    size_t heads = (size_t)G * T, place = 0, L = layers->n_budgeted;
    kvb_status status = KVB_OK;
    for (uint32_t l = 0; l < layers->n_layers && status == KVB_OK; l++) {
        const float *of_layer[KVB_RANK_FEATURES_MAX];
        if (layers->bounded && layers->bounded[l]) continue;
        for (uint32_t f = 0; f < r->info.n_features; f++) of_layer[f] = features + (f * L + place) * heads;
        status = kvb_rank_heads(r, fold, (size_t)l * G, G, of_layer, T, out + place * heads, err);
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
