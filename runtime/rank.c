// Scores by a learned ranking: a linear form of what cheap metrics say of a token. The profiler, the evaluator and the
// solver use these functions too, so that budgets are made for the very order that an engine finds.
#include "rank.h"
#include "fail.h"
#include "table.h"
#include <math.h>

double kvb_rank_value(float score, int logarithm)
{
    if (!logarithm) return score;
    return log(score > KVB_RANK_LOG_LEAST ? (double)score : KVB_RANK_LOG_LEAST);
}

kvb_status kvb_rank_moments(const float *scores, int logarithm, uint32_t sink, uint32_t n_tokens, double *mean,
                            double *scale, uint32_t *bad)
{
    double sum = 0, squares = 0, shift = 0, n = (double)n_tokens - sink;
    *mean = *scale = 0;
    for (uint32_t j = 0; j < n_tokens; j++) {
        if (isfinite(scores[j])) continue;
        *bad = j;
        return KVB_NUMERIC;
    }
    if (n_tokens <= sink) return KVB_OK;
    shift = kvb_rank_value(scores[sink], logarithm); // so that squares of large numbers do not cancel
    for (uint32_t j = sink; j < n_tokens; j++) {
        double x = kvb_rank_value(scores[j], logarithm) - shift;
        sum += x;
        squares += x * x;
    }
    double variance = squares / n - sum / n * (sum / n);
    if (!(variance > 1e-12 * (squares / n))) return KVB_OK; // all alike but for rounding
    *mean = shift + sum / n;
    *scale = 1 / sqrt(variance);
    return KVB_OK;
}

kvb_status kvb_rank_weights(const double *weights, uint32_t n_features, const int *logarithm, uint32_t sink,
                            const float *const *features, uint32_t n_tokens, float *out, const char *name,
                            kvb_error *err)
{
    double mean[KVB_RANK_FEATURES_MAX], scale[KVB_RANK_FEATURES_MAX];
    for (uint32_t f = 0; f < n_features; f++) {
        uint32_t bad = 0;
        if (kvb_rank_moments(features[f], logarithm[f], sink, n_tokens, &mean[f], &scale[f], &bad)) {
            return kvb_fail(err, KVB_NUMERIC, "%s: feature %u, token %u: expected a finite score, found %g", name,
                            (unsigned)f, (unsigned)bad, (double)features[f][bad]);
        }
    }
    double recency = weights[2 * n_features], constant = weights[2 * n_features + 1];
    for (uint32_t j = 0; j < n_tokens; j++) {
        double sum = constant - recency * log((double)(n_tokens - j));
        for (uint32_t f = 0; j >= sink && f < n_features; f++) {
            double z = (kvb_rank_value(features[f][j], logarithm[f]) - mean[f]) * scale[f];
            sum += z * (weights[2 * f] + weights[2 * f + 1] * fabs(z));
        }
        out[j] = (float)sum;
    }
    return KVB_OK;
}

static const double *fold_weights(const kvb_ranking *r, uint32_t fold, size_t head)
{
    size_t n_heads = (size_t)r->info.n_layers * r->info.n_kv_heads;
    return r->weights + (fold * n_heads + head) * r->info.n_columns;
}

kvb_status kvb_rank_fold(const kvb_ranking *r, uint32_t fold, size_t head, const float *const *features,
                         uint32_t n_tokens, float *out, kvb_error *err)
{
    return kvb_rank_weights(fold_weights(r, fold, head), r->info.n_features, r->logarithm, r->info.sink, features,
                            n_tokens, out, r->info.name, err);
}

// Adds what feature f says to the scores of all heads of a layer: of its own z, and of the heads' mean. weights [G, P].
static kvb_status add_feature(const kvb_ranking *r, const double *weights, uint32_t f, const float *scores,
                              uint32_t n_tokens, float *out, kvb_error *err)
{
    double mean[KVB_MAX_KV_HEADS], scale[KVB_MAX_KV_HEADS];
    uint32_t G = r->info.n_kv_heads, P = r->info.n_columns, bad = 0;
    for (uint32_t g = 0; g < G; g++) {
        const float *own = scores + (size_t)g * n_tokens;
        if (kvb_rank_moments(own, r->logarithm[f], r->info.sink, n_tokens, &mean[g], &scale[g], &bad)) {
            return kvb_fail(err, KVB_NUMERIC, "%s: feature %u, head %u, token %u: expected a finite score, found %g",
                            r->info.name, (unsigned)f, (unsigned)g, (unsigned)bad, (double)own[bad]);
        }
    }
    for (uint32_t j = r->info.sink; j < n_tokens; j++) {
        double sum = 0;
        for (uint32_t g = 0; g < G; g++) {
            const double *w = weights + (size_t)g * P + 2 * f;
            size_t i = (size_t)g * n_tokens + j;
            double z = (kvb_rank_value(scores[i], r->logarithm[f]) - mean[g]) * scale[g];
            sum += z;
            out[i] += (float)(z * (w[0] + w[1] * fabs(z)));
        }
        for (uint32_t g = 0; g < G; g++)
            out[(size_t)g * n_tokens + j] += (float)(weights[(size_t)g * P + 2 * r->info.n_features + f] * sum / G);
    }
    return KVB_OK;
}

kvb_status kvb_rank_layer_fold(const kvb_ranking *r, uint32_t fold, uint32_t layer, const float *const *features,
                               uint32_t n_tokens, float *out, kvb_error *err)
{
    uint32_t G = r->info.n_kv_heads, F = r->info.n_features, P = r->info.n_columns;
    const double *weights = fold_weights(r, fold, (size_t)layer * G);
    kvb_status status = KVB_OK;
    for (uint32_t g = 0; g < G && status == KVB_OK; g++) {
        const float *of_head[KVB_RANK_FEATURES_MAX];
        const double *w = weights + (size_t)g * P;
        float *own = out + (size_t)g * n_tokens;
        for (uint32_t f = 0; f < F; f++) of_head[f] = features[f] + (size_t)g * n_tokens;
        if (!r->info.layer_mean) status = kvb_rank_fold(r, fold, (size_t)layer * G + g, of_head, n_tokens, own, err);
        for (uint32_t j = 0; r->info.layer_mean && j < n_tokens; j++)
            own[j] = (float)(w[P - 1] - w[P - 2] * log((double)(n_tokens - j)));
    }
    for (uint32_t f = 0; r->info.layer_mean && f < F && status == KVB_OK; f++)
        status = add_feature(r, weights, f, features[f], n_tokens, out, err);
    return status;
}

// What both functions of the public API ask of their arguments; `function` is named in messages.
static kvb_status check_arguments(const char *function, const kvb_table *table, uint32_t layer, uint32_t head,
                                  const float *const *features, const float *out, kvb_error *err)
{
    const kvb_ranking *r = kvb_table_ranking(table);
    if (!table || !features || !out)
        return kvb_fail(err, KVB_ARGUMENT, "%s: table, features and out must not be NULL", function);
    if (!r) {
        return kvb_fail(err, KVB_ARGUMENT,
                        "%s: is for the metric %s, which is computed without the table; %s() "
                        "is for tables of a learned ranking",
                        table->name, table->info.metric, function);
    }
    if (layer >= r->info.n_layers || head >= r->info.n_kv_heads) {
        return kvb_fail(err, KVB_ARGUMENT, "%s: expected layer and head below %u and %u, found %u and %u", table->name,
                        (unsigned)r->info.n_layers, (unsigned)r->info.n_kv_heads, (unsigned)layer, (unsigned)head);
    }
    for (uint32_t f = 0; f < r->info.n_features; f++) {
        if (!features[f])
            return kvb_fail(err, KVB_ARGUMENT, "%s: feature %u, the scores of %s, is NULL", function, (unsigned)f,
                            r->info.metrics[f]);
    }
    return KVB_OK;
}

kvb_status kvb_rank_layer(const kvb_table *table, uint32_t layer, const float *const *features, uint32_t n_tokens,
                          float *out, kvb_error *err)
{
    kvb_status status = check_arguments("kvb_rank_layer", table, layer, 0, features, out, err);
    return status ? status : kvb_rank_layer_fold(table->ranking, 0, layer, features, n_tokens, out, err);
}

kvb_status kvb_rank(const kvb_table *table, uint32_t layer, uint32_t head, const float *const *features,
                    uint32_t n_tokens, float *out, kvb_error *err)
{
    kvb_status status = check_arguments("kvb_rank", table, layer, head, features, out, err);
    if (status) return status;
    const kvb_ranking *r = table->ranking;
    if (r->info.layer_mean) {
        return kvb_fail(err, KVB_ARGUMENT,
                        "%s: its ranking also looks at the mean of the layer's heads; rank them together, with "
                        "kvb_rank_layer()",
                        table->name);
    }
    return kvb_rank_fold(r, 0, (size_t)layer * r->info.n_kv_heads + head, features, n_tokens, out, err);
}
