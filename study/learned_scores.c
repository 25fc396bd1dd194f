#include "study/learned_scores.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include <endian.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

kvb_status context_sha256(const selection *s, size_t k, char out[65], kvb_error *err)
{
    uint32_t T = selection_context(s, k)->n_tokens;
    int32_t *ids = malloc(T * sizeof *ids + 1);
    if (!ids) return kvb_fail(err, KVB_MEMORY, "no memory for %u tokens", T);
    kvb_status status = record_read_tokens(s->r, s->contexts[k], ids, err);
    for (uint32_t j = 0; j < T && status == KVB_OK; j++) ids[j] = (int32_t)htole32((uint32_t)ids[j]);
    if (status == KVB_OK) status = sha256_hex(ids, T * sizeof *ids, out, err);
    free(ids);
    return status;
}

static bool has_metric(const record_context_info *c, const char *metric)
{
    for (uint32_t i = 0; i < c->n_metrics; i++)
        if (strcmp(c->metrics[i], metric) == 0) return true;
    return false;
}

kvb_status learned_scores_check(const selection *s, const kvb_ranking *r, kvb_error *err)
{
    const kvb_ranking_info *info = &r->info;
    record_shape shape = record_get_shape(s->r);
    const char *model = record_text(s->r, "model_sha256");
    if (info->n_layers != shape.n_layers || info->n_kv_heads != shape.n_kv_heads ||
        (*model && *info->model_sha256 && strcasecmp(model, info->model_sha256) != 0))
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: the ranking %s, of %u layers x %u KV heads, is of another model; fit one on this record "
                        "(kvbudget learn)",
                        s->path, info->name, info->n_layers, info->n_kv_heads);
    for (size_t k = 0; k < s->n_contexts; k++) {
        const record_context_info *c = selection_context(s, k);
        for (uint32_t f = 0; f < info->n_features && !has_metric(c, info->name); f++)
            if (!has_metric(c, info->metrics[f]))
                return kvb_fail(err, KVB_MISMATCH,
                                "%s: context %s has no scores of %s, which the ranking %s takes; profile with --metric "
                                "%s",
                                s->path, c->id, info->metrics[f], info->name, info->metrics[f]);
    }
    return KVB_OK;
}

// features [F][L,G,T]
static kvb_status rank_heads(const kvb_ranking *r, uint32_t fold, const float *features, uint32_t T, float *out,
                             kvb_error *err)
{
    size_t G = r->info.n_kv_heads, L = r->info.n_layers;
    kvb_status status = KVB_OK;
    for (uint32_t l = 0; l < L && status == KVB_OK; l++) {
        const float *of_layer[KVB_RANK_FEATURES_MAX];
        for (uint32_t f = 0; f < r->info.n_features; f++) of_layer[f] = features + (f * L + l) * G * T;
        status = kvb_rank_layer_fold(r, fold, l, of_layer, T, out + l * G * T, err);
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
    if (fold == 0 && has_metric(c, r->info.name))
        return record_read_scores(s->r, s->contexts[k], r->info.name, out, err);
    size_t numbers = (size_t)r->info.n_layers * r->info.n_kv_heads * c->n_tokens;
    float *features = malloc(F * numbers * sizeof *features);
    if (!features) return kvb_fail(err, KVB_MEMORY, "no memory for %u metrics of %u tokens", F, c->n_tokens);
    for (uint32_t f = 0; f < F && status == KVB_OK; f++)
        status = record_read_scores(s->r, s->contexts[k], r->info.metrics[f], features + f * numbers, err);
    if (status == KVB_OK) status = rank_heads(r, fold, features, c->n_tokens, out, err);
    free(features);
    return status;
}
