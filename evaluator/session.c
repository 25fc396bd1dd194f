#include "evaluator/session.h"
#include "formats/need.h"
#include "profiler/backend/meter.h"
#include "runtime/fail.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

static size_t heads_of(const session *s)
{
    return (size_t)s->m->config.n_layers * s->m->config.n_kv_heads;
}

// Whether a metric ranks by two stages, and so needs the scores of the metric that it wraps as well.
static bool has_two_stages(const metric *m)
{
    return m->base && metric_check_nested(m, NULL) != KVB_OK;
}

// Allocates memory for a context, except for its reference queries.
static session_context open_context(const session *s)
{
    const session_plan *plan = &s->plan;
    size_t scores = heads_of(s) * plan->max_tokens, floats = scores * s->m->config.head_dim;
    session_context c = {.k = need(floats, sizeof(float), "numbers of keys"),
                         .v = need(floats, sizeof(float), "numbers of values"),
                         .scores = need(plan->n_metrics, sizeof(float *), "metrics"),
                         .first = need(plan->n_metrics, sizeof(float *), "metrics"),
                         .n_metrics = plan->n_metrics};
    for (size_t i = 0; i < plan->n_metrics; i++) {
        c.scores[i] = need(scores, sizeof(float), "scores");
        if (has_two_stages(&plan->metrics[i])) c.first[i] = need(scores, sizeof(float), "scores");
    }
    return c;
}

kvb_status session_open(session **out, const model *m, const session_plan *plan, kvb_error *err)
{
    *out = NULL;
    if ((uint64_t)plan->max_tokens + plan->max_new > m->config.context_length)
        return kvb_fail(err, KVB_ARGUMENT, "%u + %u tokens: the model was trained for %u; use a shorter context",
                        plan->max_tokens, plan->max_new, m->config.context_length);
    session *s = need(1, sizeof *s, "sessions");
    *s = (session){.m = m, .plan = *plan};
    forward_plan prefill = {plan->max_tokens, 1, plan->max_new ? plan->max_new : 1, plan->oracle, false, 1};
    kvb_status status = forward_open(&s->prefill, m, &prefill, err);
    if (status == KVB_OK) status = decoder_open(&s->decode, m, plan->max_rows, plan->max_tokens + plan->max_new, err);
    s->now = open_context(s);
    for (size_t i = 0; i < plan->n_metrics && !s->ranked; i++)
        if (metric_check_nested(&plan->metrics[i], NULL) != KVB_OK)
            s->ranked = need(heads_of(s) * plan->max_tokens, sizeof(float), "scores");
    if (plan->attention)
        s->attention = window_attention_open(model_budgeted(&m->config, m->config.n_layers), m->config.n_kv_heads,
                                             plan->max_tokens);
    if (plan->refit) s->refit = references_open(m, plan->max_tokens, plan->refit);
    if (status == KVB_OK) *out = s;
    else session_close(s);
    return status;
}

void session_close(session *s)
{
    if (!s) return;
    decoder_close(s->decode);
    forward_close(s->prefill);
    session_context_free(&s->now);
    window_attention_free(&s->attention);
    references_free(&s->refit);
    free_all(s->ranked, s);
}

typedef struct watcher {
    session *s;
    const layer_observer *also;
} watcher;

static kvb_status see_layer(void *context, const layer_view *view, kvb_error *err)
{
    watcher *w = context;
    session *s = w->s;
    size_t scores = (size_t)view->n_kv_heads * view->n_tokens, floats = scores * view->head_dim;
    memcpy(s->now.k + view->layer * floats, view->k, floats * sizeof(float));
    memcpy(s->now.v + view->layer * floats, view->v, floats * sizeof(float));
    double start = meter_now();
    for (size_t i = 0; i < s->plan.n_metrics; i++) {
        if (view->window) break; // nothing of the layer is evicted, whatever its scores
        const metric *m = &s->plan.metrics[i];
        metric base;
        kvb_status status = metric_score(m, view, s->now.scores[i] + view->layer * scores, err);
        if (status == KVB_OK && s->now.first[i] && metric_base(m, &base))
            status = metric_score(&base, view, s->now.first[i] + view->layer * scores, err);
        if (status != KVB_OK) return status;
    }
    s->score_seconds += meter_now() - start;
    if (s->plan.attention && !view->window) window_attention_see(&s->attention, view);
    if (s->plan.refit) references_see(&s->refit, view);
    return w->also ? w->also->see(w->also->context, view, err) : KVB_OK;
}

kvb_status session_prefill(session *s, const int32_t *ids, uint32_t n_tokens, const layer_observer *also,
                           const forward_progress *progress, kvb_error *err)
{
    watcher w = {s, also};
    unsigned needs = VIEW_K | VIEW_V | (s->plan.attention ? WINDOW_ATTENTION_NEEDS : 0) |
                     (s->plan.refit ? VIEW_Q_RAW : 0) | (also ? also->needs : 0);
    for (size_t i = 0; i < s->plan.n_metrics; i++) needs |= metric_needs(&s->plan.metrics[i]);
    layer_observer observer = {see_layer, &w, needs};
    s->now.n_tokens = s->attention.n_layers = 0;
    kvb_status status = forward_prefill(s->prefill, ids, n_tokens, &observer, progress, NULL, err);
    if (status == KVB_OK) decoder_begin_context(s->decode, n_tokens);
    if (status != KVB_OK) return status;
    s->now.n_tokens = n_tokens;
    return KVB_OK;
}

// Moves the importance of the budgeted layers from the front of the array to their places. Other layers get zeros.
static void spread_importance(const session *s, float *importance)
{
    const model_config *c = &s->m->config;
    size_t layer = (size_t)c->n_kv_heads * s->now.n_tokens;
    uint32_t from = model_budgeted(c, c->n_layers);
    for (uint32_t l = c->n_layers; from < l && l-- > 0;)
        if (model_layer_bounded(c, l)) memset(importance + l * layer, 0, layer * sizeof *importance);
        else memmove(importance + l * layer, importance + --from * layer, layer * sizeof *importance);
}

kvb_status session_reference(session *s, const int32_t *ids, uint32_t n, float *importance, float *logits,
                             kvb_error *err)
{
    if (!s->now.n_tokens || n == 0 || n > s->plan.max_new || (importance && !s->plan.oracle))
        return kvb_fail(err, KVB_ARGUMENT, "reference: expected a prefilled context and 1 to %u tokens, found %u",
                        s->plan.max_new, n);
    decode_row *rows = need(n, sizeof *rows, "rows");
    uint32_t *wanted = need(n, sizeof *wanted, "rows");
    for (uint32_t i = 0; i < n; i++) {
        rows[i] = (decode_row){0, i, s->plan.oracle};
        wanted[i] = i;
    }
    forward_begin_questions(s->prefill, NULL, 1);
    kvb_status status = forward_rows(s->prefill, rows, ids, n, wanted, logits ? n : 0, logits, err);
    if (status == KVB_OK && importance) status = forward_importance(s->prefill, 0, importance, err);
    if (status == KVB_OK && importance) spread_importance(s, importance);
    free_all(rows, wanted);
    return status;
}

kvb_status session_rank(session *s, size_t i, const uint32_t *keep, const float **scores, kvb_error *err)
{
    uint32_t G = s->m->config.n_kv_heads;
    *scores = s->now.scores[i];
    if (metric_check_nested(&s->plan.metrics[i], NULL) == KVB_OK) return KVB_OK;
    *scores = s->ranked;
    kvb_status status = KVB_OK;
    for (size_t head = 0; head < heads_of(s) && status == KVB_OK; head += G) // a layer at a time
        status = metric_rank(&s->plan.metrics[i], s->now.first[i] ? s->now.first[i] + head * s->now.n_tokens : NULL,
                             s->now.scores[i] + head * s->now.n_tokens, G, s->now.n_tokens, keep + head,
                             s->ranked + head * s->now.n_tokens, err);
    return status;
}

kvb_status session_select(const session *s, const float *scores, const uint32_t *keep, uint32_t sink, uint32_t window,
                          kept_set *out, kvb_error *err)
{
    size_t heads = heads_of(s), total = 0;
    for (size_t h = 0; h < heads; h++) total += keep[h] < s->now.n_tokens ? keep[h] : s->now.n_tokens;
    *out = kept_set_open((uint32_t)heads, total);
    kvb_status status =
        kvb_select_all(scores, heads, s->now.n_tokens, keep, sink, window, out->offsets, out->positions, total, err);
    if (status != KVB_OK) kept_set_free(out);
    return status;
}

kv_cache *session_cache(const session *s, const kept_set *kept, uint32_t extra)
{
    const model_config *c = &s->m->config;
    return kv_cache_gather(c->n_layers, c->n_kv_heads, c->head_dim, s->now.k, s->now.v, s->now.n_tokens, kept, extra);
}

void session_cache_again(const session *s, const kept_set *kept, uint32_t extra, kv_cache **cache)
{
    if (*cache) kv_cache_refill(*cache, s->now.k, s->now.v, s->now.n_tokens, kept, extra);
    else *cache = session_cache(s, kept, extra);
}

// Refits a head, whose entries are at the front of its room.
static kvb_status refit_head(kvb_refit_head head, const kept_set *kept, kv_cache *cache, uint32_t h, void *work,
                             size_t bytes, kvb_error *err)
{
    kv_span span = kv_cache_span(cache, h / cache->n_kv_heads, h % cache->n_kv_heads);
    kvb_refit_result done;
    head.n_kept = span.count;
    head.positions = kept->positions + kept->offsets[h];
    return kvb_refit(&head, work, bytes, span.k, span.v, NULL, &done, err);
}

static kvb_status refit_heads(const references *r, const session_context *from, const kept_set *kept, kv_cache *cache,
                              kvb_error *err)
{
    uint32_t G = cache->n_kv_heads, heads = cache->n_layers * G, limit = from->n_tokens / 2 ? from->n_tokens / 2 : 1;
    kvb_refit_head largest = references_head(r, NULL, NULL, from->n_tokens, 0, 0);
    largest.n_kept = limit;
    size_t bytes = 0, threads = (size_t)omp_get_max_threads(), context = (size_t)from->n_tokens * cache->head_dim;
    kvb_status status = kvb_refit_bytes(&largest, &bytes, err);
    if (status != KVB_OK) return status;
    unsigned char *work = need(threads, bytes, "working memory for refitting");
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t h = 0; h < heads; h++) {
        kvb_error mine = {KVB_OK, ""};
        if (!r->plain[h / G] || cache->counts[h] == 0 || cache->counts[h] > limit) continue;
        kvb_refit_head head =
            references_head(r, from->k + h * context, from->v + h * context, from->n_tokens, h / G, h % G);
        kvb_status one = refit_head(head, kept, cache, h, work + (size_t)omp_get_thread_num() * bytes, bytes, &mine);
        if (one == KVB_OK) continue;
#pragma omp critical
        {
            status = one;
            if (err) *err = mine;
        }
    }
    free(work);
    return status;
}

kvb_status session_refit(session *s, const kept_set *kept, kv_cache *cache, kvb_error *err)
{
    if (!s->plan.refit || !kept) return KVB_OK;
    double start = meter_now();
    kvb_status status = refit_heads(&s->refit, &s->now, kept, cache, err);
    s->refit_seconds += meter_now() - start;
    return status;
}

// ---- Many contexts ----

session_context session_context_open(const session *s)
{
    session_context c = open_context(s);
    if (s->plan.refit) c.queries = need(references_floats(&s->refit), sizeof(float), "reference queries");
    return c;
}

void session_context_free(session_context *c)
{
    for (size_t i = 0; c->scores && i < c->n_metrics; i++) free(c->scores[i]);
    for (size_t i = 0; c->first && i < c->n_metrics; i++) free(c->first[i]);
    free_all(c->scores, c->first, c->k, c->v, c->queries);
    *c = (session_context){0};
}

uint64_t session_context_bytes(const model *m, const session_plan *plan)
{
    const model_config *c = &m->config;
    uint64_t heads = (uint64_t)c->n_layers * c->n_kv_heads, entries = heads * plan->max_tokens,
             scores = plan->n_metrics;
    for (size_t i = 0; i < plan->n_metrics; i++) scores += has_two_stages(&plan->metrics[i]);
    return (entries * (2 * c->head_dim + scores) + heads * plan->refit * c->head_dim) * sizeof(float);
}

void session_exchange(session *s, session_context *c)
{
    session_context mine = s->now;
    mine.queries = s->refit.queries;
    s->refit.queries = c->queries;
    s->now = *c;
    s->now.queries = NULL;
    *c = mine;
    if (s->now.n_tokens) decoder_begin_context(s->decode, s->now.n_tokens);
}
