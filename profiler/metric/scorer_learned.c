// A learned ranking (formats/README.md, runtime/rank.c): per KV head a linear form of other metrics' scores, each
// standardised over the head's tokens, and of recency.
//
//     s[g,j] = sum over f of w_f z_f + w'_f z_f |z_f| + u_f (mean of z_f over the layer)  -  w_r log(T - j)  +  w_1
#include "profiler/metric/learned.h"
#include "profiler/metric/scorer_parts.h"
#include "runtime/fail.h"
#include "runtime/rank.h"
#include <stdlib.h>
#include <string.h>
#include <strings.h>

typedef struct learned_ranking {
    const kvb_ranking *ranking;
    kvb_ranking *own; // NULL: the ranking is a table's
    metric features[KVB_RANK_FEATURES_MAX];
} learned_ranking;

// Returns the metric's ranking, to which its settings are a pointer.
static const learned_ranking *ranking_of(const metric *m)
{
    const learned_ranking *r;
    memcpy(&r, m->set.bytes, sizeof r);
    return r;
}

static unsigned needs_of(const metric *m)
{
    const learned_ranking *r = ranking_of(m);
    unsigned needs = 0;
    for (uint32_t f = 0; f < r->ranking->info.n_features; f++) needs |= metric_needs(&r->features[f]);
    return needs;
}

static uint32_t learned_least_tokens(const metric *m)
{
    const learned_ranking *r = ranking_of(m);
    uint32_t most = 1;
    for (uint32_t f = 0; f < r->ranking->info.n_features; f++) {
        uint32_t least = metric_least_tokens(&r->features[f]);
        most = least > most ? least : most;
    }
    return most;
}

// features [F, G, T]
static kvb_status rank_heads(const metric *m, const layer_view *view, const float *features, float *s, kvb_error *err)
{
    const kvb_ranking *r = ranking_of(m)->ranking;
    size_t n = (size_t)view->n_kv_heads * view->n_tokens;
    const float *of[KVB_RANK_FEATURES_MAX];
    if (r->info.layer_mean && view->n_kv_heads != r->info.n_kv_heads)
        return kvb_fail(err, KVB_UNSUPPORTED, "metric %s: needs all %u KV heads of a layer together, found %u of them",
                        m->spec, r->info.n_kv_heads, view->n_kv_heads);
    for (uint32_t f = 0; f < r->info.n_features; f++) of[f] = features + f * n;
    return kvb_rank_heads(r, m->fold, (size_t)view->layer * r->info.n_kv_heads + view->first_kv_head, view->n_kv_heads,
                          of, view->n_tokens, s, err);
}

static kvb_status score_learned(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    const learned_ranking *r = ranking_of(m);
    const kvb_ranking_info *info = &r->ranking->info;
    size_t n = (size_t)view->n_kv_heads * view->n_tokens;
    if (view->layer >= info->n_layers || view->first_kv_head + view->n_kv_heads > info->n_kv_heads)
        return kvb_fail(err, KVB_MISMATCH, "metric %s: fitted for %u layers of %u KV heads, which this model exceeds",
                        m->spec, info->n_layers, info->n_kv_heads);
    float *features = need(info->n_features * n, sizeof *features, "scores of features");
    kvb_status status = KVB_OK;
    for (uint32_t f = 0; f < info->n_features && status == KVB_OK; f++)
        status = metric_score(&r->features[f], view, features + f * n, err);
    if (status == KVB_OK) status = rank_heads(m, view, features, s, err);
    free(features);
    return status;
}

static const scorer scorer_learned = {
    .spec = {.name = "learned"},
    .summary = "fitted on a record by `kvbudget learn`",
    .source = "this project; docs/ranking.md",
    .formula = "s[g,j] = a linear form of other metrics' scores and of recency, one per KV head",
    .needs_of = needs_of,
    .protect_sink = 4,
    .protect_window = 1,
    .least_tokens = learned_least_tokens,
    .score = score_learned,
};

const kvb_ranking *learned_ranking_of(const metric *m)
{
    return m->kind == &scorer_learned ? ranking_of(m)->ranking : NULL;
}

metric learned_fold(const metric *m, uint32_t fold)
{
    metric out = *m;
    out.fold = fold;
    return out;
}

void learned_list_close(learned_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        kvb_ranking_close(l->items[i]->own);
        free(l->items[i]);
    }
    free(l->items);
    *l = (learned_list){0};
}

static kvb_status parse_features(learned_ranking *r, kvb_error *err)
{
    const kvb_ranking_info *info = &r->ranking->info;
    for (uint32_t f = 0; f < info->n_features; f++) {
        kvb_error inner = {0};
        kvb_status status = metric_parse(&r->features[f], info->metrics[f], &inner);
        if (status == KVB_OK) status = metric_check_nested(&r->features[f], &inner);
        if (status != KVB_OK) return kvb_fail(err, status, "ranking %s: %s", info->name, inner.message);
    }
    return KVB_OK;
}

static void make_metric(metric *out, const learned_ranking *r)
{
    memset(out, 0, sizeof *out); // settings can be compared as bytes
    out->kind = &scorer_learned;
    memcpy(out->set.bytes, &r, sizeof r);
    strcpy(out->spec, r->ranking->info.name); // 20 characters, checked when it was read
}

// Adds a ranking to the list. `own`: NULL, or what the list then frees, also after a failure.
static kvb_status add_ranking(metric *out, const kvb_ranking *ranking, kvb_ranking *own, learned_list *l,
                              kvb_error *err)
{
    learned_ranking *r = need(1, sizeof *r, "learned rankings");
    *r = (learned_ranking){.ranking = ranking, .own = own};
    l->items = need_more(l->items, l->n + 1, sizeof(struct learned_ranking *), "learned rankings");
    l->items[l->n++] = r;
    make_metric(out, r);
    return parse_features(r, err);
}

// Returns the list's ranking of that name, or NULL.
static const learned_ranking *find_ranking(const learned_list *l, const char *name)
{
    for (size_t i = 0; i < l->n; i++)
        if (strcmp(l->items[i]->ranking->info.name, name) == 0) return l->items[i];
    return NULL;
}

kvb_status learned_parse(metric *out, const char *text, learned_list *l, kvb_error *err)
{
    kvb_ranking *own;
    if (strncmp(text, "learned", 7) == 0 && strncmp(text, LEARNED_FILE, strlen(LEARNED_FILE)) != 0)
        return kvb_fail(err, KVB_ARGUMENT,
                        "metric '%.100s': a learned ranking is in a file: write " LEARNED_FILE "RANK.safetensors",
                        text);
    if (strncmp(text, LEARNED_FILE, strlen(LEARNED_FILE)) != 0) return metric_parse(out, text, err);
    kvb_status status = kvb_ranking_open(&own, text + strlen(LEARNED_FILE), err);
    return status == KVB_OK ? add_ranking(out, own, own, l, err) : status;
}

kvb_status learned_of_table(metric *out, const kvb_table *table, learned_list *l, kvb_error *err)
{
    const kvb_ranking *ranking = kvb_table_ranking(table);
    if (!ranking) return metric_parse(out, kvb_table_info(table)->metric, err);
    const learned_ranking *there = find_ranking(l, ranking->info.name);
    if (!there) return add_ranking(out, ranking, NULL, l, err);
    make_metric(out, there);
    return KVB_OK;
}

kvb_status learned_check_model(const metric *m, uint32_t n_layers, uint32_t n_kv_heads, const char *model_sha256,
                               kvb_error *err)
{
    const kvb_ranking *ranking = learned_ranking_of(m);
    if (!ranking) return KVB_OK;
    const kvb_ranking_info *info = &ranking->info;
    if (info->n_layers != n_layers || info->n_kv_heads != n_kv_heads)
        return kvb_fail(err, KVB_MISMATCH, "metric %s: fitted for %u layers of %u KV heads, the model has %u of %u",
                        m->spec, info->n_layers, info->n_kv_heads, n_layers, n_kv_heads);
    if (!*info->model_sha256 || strcasecmp(info->model_sha256, model_sha256) == 0) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "metric %s: fitted for other weights (SHA-256 %.16s..., the model has %.16s...); run `kvbudget "
                    "learn` on a record of this model",
                    m->spec, info->model_sha256, model_sha256);
}
