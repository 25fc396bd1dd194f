#include "formats/need.h"
#include "runtime/fail.h"
#include "study/learn_parts.h"
#include "study/learned_scores.h"
#include <stdlib.h>
#include <string.h>

static const cache_shape *check_shape(learn_text *t, const learned *l, size_t k, kvb_error *err, kvb_status *status)
{
    const record_context_info *c = selection_context(l->from, k);
    record_shape model = record_get_shape(l->from->r);
    t->shape = (cache_shape){model.n_layers, model.n_kv_heads, c->n_tokens, l->options.sink, 1};
    *status = cache_shape_check(&t->shape, err);
    return &t->shape;
}

kvb_status learn_text_init(learn_text *t, const learned *l, kvb_error *err)
{
    size_t most = 0, G = 1;
    *t = (learn_text){0};
    for (size_t k = 0; k < l->from->n_contexts; k++) {
        kvb_status status;
        const cache_shape *shape = check_shape(t, l, k, err, &status);
        if (status != KVB_OK) return status;
        size_t numbers = (size_t)shape_heads(shape) * shape->n_tokens;
        most = numbers > most ? numbers : most;
        G = shape->n_kv_heads;
    }
    t->z = need(l->from->n_metrics * most, sizeof *t->z, "features");
    t->plain = need(l->from->n_metrics * most, sizeof *t->plain, "scores");
    t->mean = need(most, sizeof *t->mean, "importances");
    t->top = need(most, sizeof *t->top, "importances");
    if (l->options.layer_mean) t->layer = need(l->from->n_metrics * (most / G), sizeof *t->layer, "features");
    return KVB_OK;
}

void learn_text_free(learn_text *t)
{
    free(t->z);
    free(t->layer);
    free(t->plain);
    free(t->mean);
    free(t->top);
    *t = (learn_text){0};
}

static size_t numbers_of(const learn_text *t)
{
    return (size_t)shape_heads(&t->shape) * t->shape.n_tokens;
}

static kvb_status read_scores(learn_text *t, const learned *l, size_t k, kvb_error *err)
{
    kvb_status status;
    check_shape(t, l, k, err, &status);
    size_t n = numbers_of(t);
    for (size_t f = 0; f < l->from->n_metrics && status == KVB_OK; f++)
        status = record_read_scores(l->from->r, l->from->contexts[k], l->from->metrics[f], t->plain + f * n, err);
    return status;
}

// As kvb_rank() does it.
static kvb_status standardise(learn_text *t, const learned *l, size_t k, kvb_error *err)
{
    size_t T = t->shape.n_tokens, rows = l->from->n_metrics * shape_heads(&t->shape);
    uint32_t sink = t->shape.sink;
    size_t failed = SIZE_MAX;
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < rows; row++) {
        const float *s = t->plain + row * T;
        float *z = t->z + row * T;
        int logarithm = l->logarithm[row / shape_heads(&t->shape)];
        double mean, scale;
        uint32_t bad;
        if (kvb_rank_moments(s, logarithm, sink, (uint32_t)T, &mean, &scale, &bad) != KVB_OK) {
#pragma omp critical
            failed = row < failed ? row : failed;
            continue;
        }
        for (size_t j = 0; j < T; j++) z[j] = j < sink ? 0 : (float)((kvb_rank_value(s[j], logarithm) - mean) * scale);
    }
    if (failed == SIZE_MAX) return KVB_OK;
    return kvb_fail(err, KVB_NUMERIC, "%s: context %s: %s has scores that are not finite", l->from->path,
                    selection_context(l->from, k)->id, l->from->metrics[failed / shape_heads(&t->shape)]);
}

static void average_layers(learn_text *t, const learned *l)
{
    size_t T = t->shape.n_tokens, G = t->shape.n_kv_heads, rows = l->from->n_metrics * t->shape.n_layers;
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < rows; row++) {
        for (size_t j = 0; j < T; j++) {
            double sum = 0;
            for (size_t g = 0; g < G; g++) sum += t->z[(row * G + g) * T + j];
            t->layer[row * T + j] = (float)(sum / (double)G);
        }
    }
}

// Mean and maximum over the questions; `spare` [N, T].
static kvb_status read_importance(learn_text *t, const learned *l, size_t k, float *spare, kvb_error *err)
{
    const record_context_info *c = selection_context(l->from, k);
    size_t n = numbers_of(t);
    uint32_t count = selection_count(l->from, k);
    if (count == 0)
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %s has no question with recorded queries; leave it out",
                        l->from->path, c->id);
    memset(t->mean, 0, n * sizeof *t->mean);
    memset(t->top, 0, n * sizeof *t->top);
    for (uint32_t q = 0; q < c->n_questions; q++) {
        if (!selection_has(l->from, &c->questions[q], q)) continue;
        kvb_status status = record_read_oracle(l->from->r, l->from->contexts[k], q, spare, err);
        if (status != KVB_OK) return status;
        for (size_t i = 0; i < n; i++) {
            t->mean[i] += spare[i] / (float)count;
            t->top[i] = spare[i] > t->top[i] ? spare[i] : t->top[i];
        }
    }
    t->mean_of_all = 0;
    for (size_t i = 0; i < n; i++) t->mean_of_all += t->mean[i];
    t->mean_of_all /= (double)n;
    if (t->mean_of_all > 0) return KVB_OK;
    return kvb_fail(err, KVB_NUMERIC, "%s: context %s: no token has any importance", l->from->path, c->id);
}

kvb_status learn_text_read(learn_text *t, const learned *l, size_t k, kvb_error *err)
{
    kvb_status status = read_scores(t, l, k, err);
    if (status == KVB_OK) status = read_importance(t, l, k, t->z, err); // z is not in use yet
    if (status == KVB_OK) status = standardise(t, l, k, err);
    if (status == KVB_OK && t->layer) average_layers(t, l);
    return status;
}

kvb_status learn_find_signs(learned *l, learn_text *t, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t f = 0; f < l->from->n_metrics; f++) l->logarithm[f] = 1;
    for (size_t k = 0; k < l->from->n_contexts && status == KVB_OK; k++) {
        status = read_scores(t, l, k, err);
        size_t n = numbers_of(t);
        for (size_t i = 0; i < l->from->n_metrics * n && status == KVB_OK; i++)
            if (t->plain[i] < 0) l->logarithm[i / n] = 0;
    }
    return status;
}
