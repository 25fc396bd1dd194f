#include "evaluator/damage.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

struct damage {
    damage_plan plan;
    session *s;
    float *logits;     // of the last batch, cut after cut, a row for every token that follows: [rows, vocabulary]
    kv_cache **caches; // [batch] of the last cuts, whose memory the next ones take
    uint32_t *n_rows;  // [batch] n_next each
    int32_t *ids;      // [rows]
    row_damage *rows;  // [rows]
    damage_cut *cuts;  // [batch] that are gathered, where the caller has no such list
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
    free(d->logits);
    free(d->caches);
    free(d->n_rows);
    free(d->ids);
    free(d->rows);
    free(d->cuts);
    free(d);
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

// The text is open in the session.
static kvb_status gather_cut(damage *d, const damage_cut *c, uint32_t extra, kv_cache **cache, kvb_error *err)
{
    kept_set kept;
    const float *scores;
    kvb_status status = session_rank(d->s, 0, c->keep, &scores, err);
    if (status == KVB_OK) status = session_select(d->s, scores, c->keep, d->plan.sink, d->plan.window, &kept, err);
    if (status != KVB_OK) return status;
    session_cache_again(d->s, &kept, extra, cache);
    status = session_refit(d->s, &kept, *cache, err);
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

// From d->logits of the n cuts' continuations to what they cost.
static void judge_cuts(damage *d, const damage_cut *cuts, uint32_t n)
{
    uint32_t next = d->plan.n_next;
#pragma omp parallel for collapse(2) schedule(static) // a row of all cuts together: the full cache's stays near
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

kvb_status damage_measure(damage *d, damage_text *t, const uint32_t *keep, size_t n, damage_value *out, kvb_error *err)
{
    size_t heads = (size_t)d->s->m->config.n_layers * d->s->m->config.n_kv_heads;
    kvb_status status = KVB_OK;
    for (size_t i = 0, some; i < n && status == KVB_OK; i += some) {
        some = n - i < d->plan.batch ? n - i : d->plan.batch;
        for (size_t k = 0; k < some; k++) d->cuts[k] = (damage_cut){t, keep + (i + k) * heads, out + i + k};
        status = damage_measure_cuts(d, d->cuts, some, err);
    }
    return status;
}
