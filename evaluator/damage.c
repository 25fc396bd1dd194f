#include "evaluator/damage.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

struct damage {
    damage_plan plan;
    session *s;
    float *logits;     // of the last batch, cut after cut, a row for every token that follows: [rows, vocabulary]
    kv_cache **caches; // [batch] of the last cuts; the next ones reuse their memory
    uint32_t *n_rows;  // [batch] n_next each
    int32_t *ids;      // [rows]
    row_damage *rows;  // [rows]
    damage_cut *cuts;  // [batch] cuts of a batch, if the caller passes no such list
};

static session_plan session_plan_of(const damage_plan *p)
{
    return (session_plan){p->n_tokens, p->n_next, p->batch * p->n_next, p->by, 1, false, false, p->refit};
}

kvb_status damage_open(damage **out, const model *m, const damage_plan *plan, kvb_error *err)
{
    *out = NULL;
    if (plan->n_tokens == 0 || plan->n_next < 2 || plan->batch == 0 || (uint64_t)plan->batch * plan->n_next > INT32_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "continuation: %u tokens after %u in batches of %u, expected 2 or more",
                        plan->n_next, plan->n_tokens, plan->batch);
    damage *d = need(1, sizeof *d, "evaluations");
    size_t rows = (size_t)plan->batch * plan->n_next;
    session_plan needs = session_plan_of(plan);
    *d = (damage){.plan = *plan,
                  .logits = need(rows * m->config.vocabulary, sizeof(float), "logits"),
                  .caches = need(plan->batch, sizeof(kv_cache *), "cuts"),
                  .n_rows = need(plan->batch, sizeof(uint32_t), "cuts"),
                  .ids = need(rows, sizeof(int32_t), "token ids"),
                  .rows = need(rows, sizeof(row_damage), "rows"),
                  .cuts = need(plan->batch, sizeof(damage_cut), "cuts")};
    for (uint32_t i = 0; i < plan->batch; i++) d->n_rows[i] = plan->n_next;
    kvb_status status = session_open(&d->s, m, &needs, err);
    if (status == KVB_OK) *out = d;
    else damage_close(d);
    return status;
}

void damage_close(damage *d)
{
    if (!d) return;
    session_close(d->s);
    for (uint32_t i = 0; i < d->plan.batch; i++) kv_cache_close(d->caches[i]);
    free_all(d->logits, d->caches, d->n_rows, d->ids, d->rows, d->cuts, d);
}

// ---- Texts ----

uint64_t damage_text_bytes(const model *m, const damage_plan *plan)
{
    uint64_t logits = (uint64_t)plan->n_next * m->config.vocabulary * 2 * sizeof(float);
    const session_plan needs = session_plan_of(plan);
    return session_context_bytes(m, &needs) + logits;
}

damage_text damage_text_open(const damage *d)
{
    return (damage_text){session_context_open(d->s), predictions_open(d->plan.n_next, d->s->m->config.vocabulary)};
}

void damage_text_close(damage_text *t)
{
    session_context_free(&t->context);
    predictions_close(&t->full);
}

static kvb_status predict(damage *d, damage_text *t, kvb_error *err)
{
    kv_cache *full = session_cache(d->s, NULL, t->full.n);
    kvb_status status =
        decoder_run(d->s->decode, &full, 1, &t->full.n, t->full.next, NULL, LOGITS_ALL, t->full.logits, err);
    kv_cache_close(full);
    if (status == KVB_OK) predictions_finish(&t->full);
    return status;
}

kvb_status damage_text_fill(damage *d, damage_text *t, const int32_t *ids, const forward_progress *progress,
                            kvb_error *err)
{
    memcpy(t->full.next, ids + d->plan.n_tokens, d->plan.n_next * sizeof *ids);
    kvb_status status = session_prefill(d->s, ids, d->plan.n_tokens, NULL, progress, err);
    if (status == KVB_OK) status = predict(d, t, err);
    if (status == KVB_OK) session_exchange(d->s, &t->context);
    return status;
}

// ---- Cuts ----

// Makes *cache the cut of the text that is open in the session, with room for `extra` entries in every head.
static kvb_status gather_cut(damage *d, const damage_cut *c, uint32_t extra, kv_cache **cache, kvb_error *err)
{
    kept_set kept;
    const float *scores;
    kvb_status status = session_rank(d->s, 0, c->keep, &scores, err);
    if (status == KVB_OK) status = session_select(d->s, scores, c->keep, d->plan.sink, d->plan.window, &kept, err);
    if (status != KVB_OK) return status;
    session_cache_again(d->s, &kept, extra, cache);
    status = session_refit(d->s, &kept, *cache, err);
    if (status == KVB_OK && c->formats) status = kv_cache_round(*cache, c->formats, err);
    kept_set_free(&kept);
    return status;
}

static kvb_status cut(damage *d, const damage_cut *c, kv_cache **cache, kvb_error *err)
{
    session_exchange(d->s, &c->text->context);
    kvb_status status = gather_cut(d, c, c->text->full.n, cache, err);
    session_exchange(d->s, &c->text->context);
    return status;
}

static damage_value mean_of(const predictions *full, const row_damage *rows)
{
    damage_value sum = {0};
    uint32_t n = full->n;
    for (uint32_t i = 0; i < n; i++) {
        sum.kl += rows[i].kl / n;
        sum.flips += !rows[i].agree / (double)n;
        if (i + 1 < n) sum.nll += (rows[i].nll - full->nll[i]) / (n - 1);
    }
    return sum;
}

// Computes what n cuts cost from d->logits, the logits of their continuations.
static void judge_cuts(damage *d, const damage_cut *cuts, uint32_t n)
{
    uint32_t next = d->plan.n_next;
#pragma omp parallel for collapse(2) schedule(static) // row by row: the full cache's stays hot for all cuts
    for (uint32_t row = 0; row < next; row++)
        for (uint32_t i = 0; i < n; i++) {
            const predictions *full = &cuts[i].text->full;
            size_t here = (size_t)i * next + row;
            d->rows[here] = predictions_row(full, row, d->logits + here * full->vocabulary);
        }
    for (uint32_t i = 0; i < n; i++) *cuts[i].out = mean_of(&cuts[i].text->full, d->rows + (size_t)i * next);
}

static kvb_status measure_batch(damage *d, const damage_cut *cuts, uint32_t n, kvb_error *err)
{
    uint32_t next = d->plan.n_next;
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) {
        memcpy(d->ids + (size_t)i * next, cuts[i].text->full.next, next * sizeof *d->ids);
        status = cut(d, &cuts[i], &d->caches[i], err);
    }
    if (status == KVB_OK)
        status = decoder_run(d->s->decode, d->caches, n, d->n_rows, d->ids, NULL, LOGITS_ALL, d->logits, err);
    if (status == KVB_OK) judge_cuts(d, cuts, n);
    return status;
}

kvb_status damage_measure_cuts(damage *d, const damage_cut *cuts, size_t n, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < n && status == KVB_OK; i += d->plan.batch)
        status = measure_batch(d, cuts + i, n - i < d->plan.batch ? (uint32_t)(n - i) : d->plan.batch, err);
    return status;
}

kvb_status damage_measure(damage *d, damage_text *t, const uint32_t *keep, const uint8_t *formats, size_t n,
                          damage_value *out, kvb_error *err)
{
    size_t heads = (size_t)d->s->m->config.n_layers * d->s->m->config.n_kv_heads;
    kvb_status status = KVB_OK;
    for (size_t i = 0, some; i < n && status == KVB_OK; i += some) {
        some = n - i < d->plan.batch ? n - i : d->plan.batch;
        for (size_t k = 0; k < some; k++)
            d->cuts[k] =
                (damage_cut){t, keep + (i + k) * heads, out + i + k, formats ? formats + 2 * (i + k) * heads : NULL};
        status = damage_measure_cuts(d, d->cuts, some, err);
    }
    return status;
}

// ---- Heads cut one at a time ----
//
// Nothing changes below the head's layer, so a cut begins at that layer with the residual stream of the full cache. All
// cuts share the context's keys and values except those of the head itself.

// One text, open in the session.
typedef struct head_work {
    damage *d;
    damage_text *t;
    const uint32_t *keep; // [n, L*G]
    uint32_t n;
    kv_cache **cut;    // [n] the context with all heads cut to a row of `keep`
    kv_cache *whole;   // the context
    kv_cache *hidden;  // [G] the context without one head of the present layer
    uint32_t *counts;  // [G, L*G] of `hidden`
    float *streams;    // [L, n_next, D] in front of every layer, full cache
    float *stream;     // [batch, n_next, D]
    kv_cache **caches; // [batch] of the waiting cuts, which d->cuts lists
    uint32_t waiting;
    damage_value *out;
} head_work;

static size_t work_heads(const head_work *w)
{
    return (size_t)w->whole->n_layers * w->whole->n_kv_heads;
}

static void close_head_work(head_work *w)
{
    for (uint32_t i = 0; w->cut && i < w->n; i++) kv_cache_close(w->cut[i]);
    for (uint32_t i = 0; i < w->waiting; i++) kv_cache_close(w->caches[i]);
    kv_cache_close(w->whole);
    free_all(w->cut, w->hidden, w->counts, w->streams, w->stream, w->caches);
}

static kvb_status cut_levels(head_work *w, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < w->n && status == KVB_OK; i++) {
        const damage_cut level = {w->t, w->keep + i * work_heads(w), NULL, NULL};
        status = gather_cut(w->d, &level, 0, &w->cut[i], err);
    }
    return status;
}

// Fills w->streams with the full cache's residual streams.
static kvb_status run_whole(head_work *w, kvb_error *err)
{
    damage *d = w->d;
    kv_cache *cache = kv_cache_extend(w->whole, w->t->full.n);
    kvb_status status = decoder_run_streams(d->s->decode, &cache, 1, &w->t->full.n, w->t->full.next, w->streams, err);
    kv_cache_close(cache);
    return status;
}

static kvb_status open_head_work(head_work *w, kvb_error *err)
{
    damage *d = w->d;
    const model_config *c = &d->s->m->config;
    size_t row = (size_t)w->t->full.n * c->width;
    w->whole = session_cache(d->s, NULL, 0);
    w->cut = need(w->n, sizeof *w->cut, "cuts");
    w->hidden = need(c->n_kv_heads, sizeof *w->hidden, "heads");
    w->counts = need(c->n_kv_heads * work_heads(w), sizeof *w->counts, "heads");
    w->streams = need(c->n_layers * row, sizeof(float), "numbers of the residual stream");
    w->stream = need(d->plan.batch * row, sizeof(float), "numbers of the residual stream");
    w->caches = need(d->plan.batch, sizeof(kv_cache *), "cuts");
    kvb_status status = cut_levels(w, err);
    return status == KVB_OK ? run_whole(w, err) : status;
}

// Makes hidden[g] the context as a cut of head (layer, g) sees it: without that head's entries, which the cut holds.
static void hide_head(head_work *w, uint32_t layer, uint32_t g)
{
    size_t heads = work_heads(w);
    w->hidden[g] = *w->whole;
    w->hidden[g].counts = w->counts + g * heads;
    memcpy(w->hidden[g].counts, w->whole->counts, heads * sizeof *w->whole->counts);
    w->hidden[g].counts[(size_t)layer * w->whole->n_kv_heads + g] = 0;
}

static kv_cache *cut_head(head_work *w, uint32_t layer, uint32_t g, uint32_t cut)
{
    const kv_cache *whole = w->whole;
    size_t heads = work_heads(w), head = (size_t)layer * whole->n_kv_heads + g, d = whole->head_dim;
    kv_span from = kv_cache_span(w->cut[cut], layer, g);
    uint32_t *room = need(heads, sizeof *room, "heads");
    for (size_t h = 0; h < heads; h++) room[h] = w->t->full.n;
    room[head] += from.count;
    kv_cache *out = kv_cache_open(whole->n_layers, whole->n_kv_heads, whole->head_dim, room);
    free(room);
    for (uint32_t i = 0; i < from.count; i++)
        kv_cache_append(out, layer, g, from.k + i * d, from.v + i * d, from.positions[i]);
    out->base = &w->hidden[g];
    out->next_position = whole->next_position;
    return out;
}

// Runs and judges the waiting cuts, all of one layer.
static kvb_status run_waiting(head_work *w, uint32_t layer, kvb_error *err)
{
    damage *d = w->d;
    uint32_t n = w->waiting, next = d->plan.n_next;
    size_t row = (size_t)next * d->s->m->config.width;
    if (n == 0) return KVB_OK;
    for (uint32_t i = 0; i < n; i++) memcpy(w->stream + i * row, w->streams + layer * row, row * sizeof(float));
    kvb_status status = decoder_run_from(d->s->decode, layer, w->stream, w->caches, n, d->n_rows, d->logits, err);
    for (uint32_t i = 0; i < n; i++) kv_cache_close(w->caches[i]);
    w->waiting = 0;
    if (status != KVB_OK) return status;
    judge_cuts(d, d->cuts, n);
    return KVB_OK;
}

static kvb_status run_layer_cuts(head_work *w, uint32_t layer, kvb_error *err)
{
    uint32_t G = w->whole->n_kv_heads, n_tokens = w->d->s->now.n_tokens;
    kvb_status status = KVB_OK;
    for (uint32_t g = 0; g < G; g++) {
        hide_head(w, layer, g);
        for (uint32_t i = 0; i < w->n && status == KVB_OK; i++) {
            size_t at = i * work_heads(w) + (size_t)layer * G + g;
            w->out[at] = (damage_value){0};
            if (w->keep[at] >= n_tokens) continue;
            w->caches[w->waiting] = cut_head(w, layer, g, i);
            w->d->cuts[w->waiting++] = (damage_cut){w->t, NULL, &w->out[at], NULL};
            if (w->waiting == w->d->plan.batch) status = run_waiting(w, layer, err);
        }
    }
    return status == KVB_OK ? run_waiting(w, layer, err) : status;
}

static kvb_status run_head_cuts(head_work *w, const forward_progress *progress, kvb_error *err)
{
    uint32_t L = w->d->s->m->config.n_layers;
    kvb_status status = open_head_work(w, err);
    for (uint32_t l = 0; l < L && status == KVB_OK; l++) {
        status = run_layer_cuts(w, l, err);
        if (status == KVB_OK && progress && !progress->step(progress->context, l + 1, L))
            status = kvb_fail(err, KVB_INTERRUPTED, "stopped");
    }
    close_head_work(w);
    return status;
}

kvb_status damage_measure_heads(damage *d, damage_text *t, const uint32_t *keep, uint32_t n, damage_value *out,
                                const forward_progress *progress, kvb_error *err)
{
    head_work w = {.d = d, .t = t, .keep = keep, .n = n, .out = out};
    session_exchange(d->s, &t->context);
    kvb_status status = run_head_cuts(&w, progress, err);
    session_exchange(d->s, &t->context);
    return status;
}
