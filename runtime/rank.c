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

kvb_status kvb_rank_fold(const kvb_ranking *r, uint32_t fold, size_t head, const float *const *features,
                         uint32_t n_tokens, float *out, kvb_error *err)
{
    size_t n_heads = (size_t)r->info.n_layers * r->info.n_kv_heads;
    return kvb_rank_weights(r->weights + (fold * n_heads + head) * r->info.n_columns, r->info.n_features, r->logarithm,
                            r->info.sink, features, n_tokens, out, r->info.name, err);
}

kvb_status kvb_rank(const kvb_table *table, uint32_t layer, uint32_t head, const float *const *features,
                    uint32_t n_tokens, float *out, kvb_error *err)
{
    const kvb_ranking *r = kvb_table_ranking(table);
    if (!table || !features || !out)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_rank: table, features and out must not be NULL");
    if (!r) {
        return kvb_fail(err, KVB_ARGUMENT,
                        "%s: is for the metric %s, which is computed without the table; kvb_rank() "
                        "is for tables of a learned ranking",
                        table->name, table->info.metric);
    }
    if (layer >= r->info.n_layers || head >= r->info.n_kv_heads) {
        return kvb_fail(err, KVB_ARGUMENT, "%s: expected layer and head below %u and %u, found %u and %u", table->name,
                        (unsigned)r->info.n_layers, (unsigned)r->info.n_kv_heads, (unsigned)layer, (unsigned)head);
    }
    for (uint32_t f = 0; f < r->info.n_features; f++) {
        if (!features[f])
            return kvb_fail(err, KVB_ARGUMENT, "kvb_rank: feature %u, the scores of %s, is NULL", (unsigned)f,
                            r->info.metrics[f]);
    }
    return kvb_rank_fold(r, 0, (size_t)layer * r->info.n_kv_heads + head, features, n_tokens, out, err);
}
