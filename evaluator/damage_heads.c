// Heads cut one at a time. Below the head's layer nothing changes, so a cut begins there, with the residual stream of
// the full cache; and all cuts share the context's keys and values but those of the head itself.
#include "evaluator/damage_parts.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

// One text, open in the session.
typedef struct head_work {
    damage *d;
    damage_text *t;
    const uint32_t *keep; // [n, L*G]
    uint32_t n;
    kept_set *kept;    // [n] what each row of `keep` would leave
    kv_cache *whole;   // the context
    kv_cache *hidden;  // [G] the context without one head of the present layer
    uint32_t *counts;  // [G, L*G] of `hidden`
    float *streams;    // [L, n_next, D] in front of every layer, full cache
    float *stream;     // [batch, n_next, D]
    kv_cache **caches; // [batch] of the cuts that wait, which are in d->cuts
    uint32_t waiting;
    damage_value *out;
} head_work;

static size_t heads_of(const head_work *w)
{
    return (size_t)w->whole->n_layers * w->whole->n_kv_heads;
}

// ---- Opening ----

static void close_work(head_work *w)
{
    for (uint32_t i = 0; w->kept && i < w->n; i++) kept_set_free(&w->kept[i]);
    for (uint32_t i = 0; i < w->waiting; i++) kv_cache_close(w->caches[i]);
    kv_cache_close(w->whole);
    free(w->kept);
    free(w->hidden);
    free(w->counts);
    free(w->streams);
    free(w->stream);
    free(w->caches);
}

static kvb_status select_all(head_work *w, kvb_error *err)
{
    damage *d = w->d;
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < w->n && status == KVB_OK; i++) {
        const uint32_t *keep = w->keep + i * heads_of(w);
        const float *scores;
        status = session_rank(d->s, 0, keep, &scores, err);
        if (status == KVB_OK)
            status = session_select(d->s, scores, keep, d->plan.sink, d->plan.window, &w->kept[i], err);
    }
    return status;
}

// The full cache's residual streams.
static kvb_status run_whole(head_work *w, kvb_error *err)
{
    damage *d = w->d;
    kv_cache *cache = kv_cache_extend(w->whole, w->t->full.n);
    kvb_status status = decoder_run_streams(d->s->decode, &cache, 1, &w->t->full.n, w->t->full.next, w->streams, err);
    kv_cache_close(cache);
    return status;
}

static kvb_status open_work(head_work *w, kvb_error *err)
{
    damage *d = w->d;
    const model_config *c = &d->s->m->config;
    size_t row = (size_t)w->t->full.n * c->width;
    w->whole = session_cache(d->s, NULL, 0);
    w->kept = need(w->n, sizeof *w->kept, "cuts");
    w->hidden = need(c->n_kv_heads, sizeof *w->hidden, "heads");
    w->counts = need(c->n_kv_heads * heads_of(w), sizeof *w->counts, "heads");
    w->streams = need(c->n_layers * row, sizeof(float), "numbers of the residual stream");
    w->stream = need(d->plan.batch * row, sizeof(float), "numbers of the residual stream");
    w->caches = need(d->plan.batch, sizeof(kv_cache *), "cuts");
    kvb_status status = select_all(w, err);
    return status == KVB_OK ? run_whole(w, err) : status;
}

// ---- Cuts ----

// The context as it looks to a cut of head (layer, g): without that head's entries, which the cut brings itself.
static void hide_head(head_work *w, uint32_t layer, uint32_t g)
{
    size_t heads = heads_of(w);
    w->hidden[g] = *w->whole;
    w->hidden[g].counts = w->counts + g * heads;
    memcpy(w->hidden[g].counts, w->whole->counts, heads * sizeof *w->whole->counts);
    w->hidden[g].counts[(size_t)layer * w->whole->n_kv_heads + g] = 0;
}

static kv_cache *cut_head(head_work *w, uint32_t layer, uint32_t g, uint32_t cut)
{
    const kv_cache *whole = w->whole;
    size_t heads = heads_of(w), head = (size_t)layer * whole->n_kv_heads + g, d = whole->head_dim;
    const kept_set *kept = &w->kept[cut];
    uint32_t *room = need(heads, sizeof *room, "heads");
    for (size_t h = 0; h < heads; h++) room[h] = w->t->full.n;
    room[head] += (uint32_t)(kept->offsets[head + 1] - kept->offsets[head]);
    kv_cache *out = kv_cache_open(whole->n_layers, whole->n_kv_heads, whole->head_dim, room);
    free(room);
    kv_span from = kv_cache_span(whole, layer, g);
    for (size_t i = kept->offsets[head]; i < kept->offsets[head + 1]; i++) {
        uint32_t j = kept->positions[i]; // entries of the whole context stand at their positions
        kv_cache_append(out, layer, g, from.k + j * d, from.v + j * d, j);
    }
    out->base = &w->hidden[g];
    out->next_position = whole->next_position;
    return out;
}

// Runs the cuts that wait, all of one layer.
static kvb_status run_waiting(head_work *w, uint32_t layer, kvb_error *err)
{
    damage *d = w->d;
    uint32_t n = w->waiting, next = w->t->full.n;
    size_t row = (size_t)next * d->s->m->config.width;
    if (n == 0) return KVB_OK;
    for (uint32_t i = 0; i < n; i++) {
        d->n_rows[i] = next;
        memcpy(w->stream + i * row, w->streams + layer * row, row * sizeof(float));
    }
    kvb_status status = decoder_run_from(d->s->decode, layer, w->stream, w->caches, n, d->n_rows, d->logits, err);
    for (uint32_t i = 0; i < n; i++) kv_cache_close(w->caches[i]);
    w->waiting = 0;
    if (status != KVB_OK) return status;
    damage_judge(d, d->cuts, n);
    return KVB_OK;
}

static kvb_status run_layer_cuts(head_work *w, uint32_t layer, kvb_error *err)
{
    uint32_t G = w->whole->n_kv_heads, n_tokens = w->d->s->n_tokens;
    kvb_status status = KVB_OK;
    for (uint32_t g = 0; g < G; g++) {
        hide_head(w, layer, g);
        for (uint32_t i = 0; i < w->n && status == KVB_OK; i++) {
            size_t at = i * heads_of(w) + (size_t)layer * G + g;
            w->out[at] = (damage_value){0};
            if (w->keep[at] >= n_tokens) continue;
            w->caches[w->waiting] = cut_head(w, layer, g, i);
            w->d->cuts[w->waiting++] = (damage_cut){w->t, NULL, &w->out[at]};
            if (w->waiting == w->d->plan.batch) status = run_waiting(w, layer, err);
        }
    }
    return status == KVB_OK ? run_waiting(w, layer, err) : status;
}

static kvb_status run_all(head_work *w, const forward_progress *progress, kvb_error *err)
{
    uint32_t L = w->d->s->m->config.n_layers;
    kvb_status status = open_work(w, err);
    for (uint32_t l = 0; l < L && status == KVB_OK; l++) {
        status = run_layer_cuts(w, l, err);
        if (status == KVB_OK && progress && !progress->step(progress->context, l + 1, L))
            status = kvb_fail(err, KVB_INTERRUPTED, "stopped");
    }
    close_work(w);
    return status;
}

kvb_status damage_measure_heads(damage *d, damage_text *t, const uint32_t *keep, uint32_t n, damage_value *out,
                                const forward_progress *progress, kvb_error *err)
{
    head_work w = {.d = d, .t = t, .keep = keep, .n = n, .out = out};
    kvb_status status = session_exchange(d->s, &t->context, err);
    if (status == KVB_OK) status = run_all(&w, progress, err);
    kvb_status back = session_exchange(d->s, &t->context, status == KVB_OK ? err : NULL);
    return status == KVB_OK ? back : status;
}
