#include "evaluator/method.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>

const char *method_name(const method *m)
{
    return m->p.kind ? m->p.spec : m->m.spec;
}

metric *method_metrics(size_t *n, const method_list *list)
{
    metric *metrics = need(list->n, sizeof *metrics, "metrics");
    *n = 0;
    for (uint32_t i = 0; i < list->n; i++)
        if (list->methods[i].m.kind) metrics[(*n)++] = list->methods[i].m;
    return metrics;
}

bool method_needs_attention(const method_list *list)
{
    for (uint32_t i = 0; i < list->n_columns; i++)
        if (allocator_needs_attention(list->columns[i].how)) return true;
    return false;
}

static allocator_shape shape_of(const model *m)
{
    return (allocator_shape){m->config.n_layers, m->config.n_kv_heads, &m->config.bounded, m->config.head_dim};
}

static size_t heads_of(const allocator_shape *s)
{
    return (size_t)s->n_layers * s->n_kv_heads;
}

kvb_status method_select(session *s, const method_list *list, const method_column *column, double ratio,
                         const float *importance, kept_set *out, kvb_error *err)
{
    const method *m = &list->methods[column->method];
    const allocator_shape shape = shape_of(s->m);
    bool oracle = column->how->kind == ALLOCATOR_ORACLE;
    const float *scores = oracle ? importance : s->now.scores[column->method];
    *out = (kept_set){0};
    if (!scores)
        return kvb_fail(err, KVB_ARGUMENT, "allocator %s needs the importance of what follows, which is not known",
                        column->how->label);
    uint32_t *keep = need(heads_of(&shape), sizeof *keep, "heads");
    kvb_status status = allocator_budgets(column->how, &shape, ratio, s->now.n_tokens, scores, &s->attention, m->sink,
                                          m->window, keep, err);
    if (status == KVB_OK && !oracle) status = session_rank(s, column->method, keep, &scores, err);
    if (status == KVB_OK) status = session_select(s, scores, keep, m->sink, m->window, out, err);
    if (status == KVB_OK) status = allocator_formats(column->how, &shape, ratio, &out->formats, err);
    free(keep);
    return status;
}

kvb_status method_policy(policy_run **out, const model *m, const method_list *list, const method_column *column,
                         double ratio, uint32_t n_tokens, uint32_t extra, kvb_error *err)
{
    const policy *p = &list->methods[column->method].p;
    const allocator_shape shape = shape_of(m);
    *out = NULL;
    if (allocator_has_formats(column->how))
        return kvb_fail(err, KVB_UNSUPPORTED, "allocator %s packs the cache, which a policy changes at every step",
                        column->how->label);
    if (allocator_needs_scores(column->how))
        return kvb_fail(err, KVB_ARGUMENT, "allocator %s needs scores, which do not exist when a policy begins",
                        column->how->label);
    uint32_t *keep = need(heads_of(&shape), sizeof *keep, "heads");
    kvb_status status =
        allocator_budgets(column->how, &shape, policy_capacity_ratio(p, ratio), n_tokens, NULL, NULL, 0, 0, keep, err);
    if (status == KVB_OK) status = policy_run_open(out, p, m, keep, ratio, n_tokens, extra, err);
    if (status == KVB_OK && p->interval > 1 &&
        column->how->table) // `1 - ratio` of the context stays, however long the text gets
        status = policy_run_grow(*out, column->how->table, (uint32_t)((1 - ratio) * n_tokens), err);
    if (status != KVB_OK) {
        policy_run_close(*out);
        *out = NULL;
    }
    free(keep);
    return status;
}
