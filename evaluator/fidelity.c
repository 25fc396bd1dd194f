#include "evaluator/fidelity.h"
#include "formats/need.h"
#include "profiler/backend/meter.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

kvb_status fidelity_open(fidelity **out, session *s, uint32_t n_next, uint32_t batch, kvb_error *err)
{
    const model_config *c = &s->m->config;
    size_t heads = (size_t)c->n_layers * c->n_kv_heads, logits = (size_t)batch * n_next;
    if (logits < FIDELITY_POLICIES) logits = FIDELITY_POLICIES;
    *out = NULL;
    if (n_next < 2 || n_next > s->plan.max_new || batch == 0 || (uint64_t)batch * n_next > s->plan.max_rows)
        return kvb_fail(err, KVB_ARGUMENT, "continuation: %u tokens in batches of %u, expected 2 to %u and %u rows",
                        n_next, batch, s->plan.max_new, s->plan.max_rows);
    fidelity *f = need(1, sizeof *f, "evaluations");
    *f = (fidelity){.s = s, .n_next = n_next, .batch = batch, .full = predictions_open(n_next, c->vocabulary)};
    f->cell_logits = need(logits * c->vocabulary, sizeof(float), "logits");
    f->importance = need(heads * s->plan.max_tokens, sizeof(float), "numbers of the oracle");
    *out = f;
    return KVB_OK;
}

void fidelity_close(fidelity *f)
{
    if (!f) return;
    free_all(f->importance, f->cell_logits);
    predictions_close(&f->full);
    free(f);
}

// ---- The full cache ----

kvb_status fidelity_begin(fidelity *f, const int32_t *ids, uint32_t n_tokens, const layer_observer *also,
                          const forward_progress *progress, kvb_error *err)
{
    kv_cache *full = NULL;
    memcpy(f->full.next, ids + n_tokens, f->n_next * sizeof *ids);
    kvb_status status = session_prefill(f->s, ids, n_tokens, also, progress, err);
    if (status == KVB_OK) status = session_reference(f->s, f->full.next, f->n_next, f->importance, NULL, err);
    if (status == KVB_OK) full = session_cache(f->s, NULL, f->n_next);
    if (status == KVB_OK)
        status = decoder_run(f->s->decode, &full, 1, &f->n_next, f->full.next, NULL, LOGITS_ALL, f->full.logits, err);
    kv_cache_close(full);
    if (status == KVB_OK) predictions_finish(&f->full);
    return status;
}

// ---- A compacted cache ----

fidelity_cell fidelity_cell_open(uint32_t n)
{
    return (fidelity_cell){.kl = need(n, sizeof(double), "rows"),
                           .nll = need(n, sizeof(double), "rows"),
                           .agree = need(n, sizeof(double), "rows"),
                           .looked = NAN};
}

void fidelity_cell_free(fidelity_cell *c)
{
    free_all(c->kl, c->nll, c->agree);
    *c = (fidelity_cell){0};
}

// Returns the share of all importance that is evicted.
static double evicted_importance(const fidelity *f, const kept_set *kept)
{
    size_t T = f->s->now.n_tokens;
    double total = 0, stays = 0;
    for (size_t i = 0; i < kept->n_heads * T; i++) total += f->importance[i];
    for (size_t h = 0; h < kept->n_heads; h++)
        for (size_t i = kept->offsets[h]; i < kept->offsets[h + 1]; i++)
            stays += f->importance[h * T + kept->positions[i]];
    return total > 0 ? fmax(0, 1 - stays / total) : 0;
}

// Measures row i of the continuation, whose logits are `got`.
static void measure_row(const fidelity *f, uint32_t i, const float *got, fidelity_cell *out)
{
    row_damage row = predictions_row(&f->full, i, got);
    out->kl[i] = row.kl;
    out->agree[i] = row.agree;
    if (i + 1 < f->n_next) out->nll[i] = row.nll;
}

// Counts what a cache keeps and how much memory it takes.
static void measure_cache(const fidelity *f, const kv_cache *cache, fidelity_cell *out)
{
    const model_config *c = &f->s->m->config;
    out->kept = kv_cache_entries(cache);
    out->ratio = 1 - model_kept_share(c, out->kept, f->s->now.n_tokens);
    out->bytes = kv_cache_bytes(cache);
    out->allocated = kv_cache_allocated(cache);
    for (uint32_t i = 0; i + 1 < f->n_next; i++) out->full_nll += f->full.nll[i] / (f->n_next - 1);
}

// Makes and measures a cell's cache. If the context is packed, it is in *packed, and *cache extends it.
static kvb_status measure_cell(const fidelity *f, const kept_set *kept, kv_cache **cache, kv_cache **packed,
                               fidelity_cell *out, kvb_error *err)
{
    *out = fidelity_cell_open(f->n_next);
    *cache = session_cache(f->s, kept, 0);
    out->loss = evicted_importance(f, kept);
    kvb_status status = session_refit(f->s, kept, *cache, err);
    if (status == KVB_OK && kept->formats) status = kv_cache_pack(*cache, kept->formats, err);
    measure_cache(f, *cache, out);
    if (!kept->formats) kv_cache_compact(*cache, f->n_next); // room for the continuation
    else if (status == KVB_OK) {
        *packed = *cache;
        *cache = kv_cache_extend(*packed, f->n_next);
    }
    return status;
}

kvb_status fidelity_measure(fidelity *f, const kept_set *kept, uint32_t n, fidelity_cell *out, kvb_error *err)
{
    size_t rows = (size_t)n * f->n_next, vocabulary = f->s->m->config.vocabulary;
    double start = meter_now();
    memset(out, 0, n * sizeof *out);
    kv_cache **caches = need(2 * (size_t)n, sizeof *caches, "cells"); // then the packed ones that they extend
    uint32_t *n_rows = need(n, sizeof *n_rows, "cells");
    int32_t *ids = need(rows, sizeof *ids, "token ids");
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) {
        n_rows[i] = f->n_next;
        memcpy(ids + (size_t)i * f->n_next, f->full.next, f->n_next * sizeof *ids);
        status = measure_cell(f, &kept[i], &caches[i], &caches[n + i], &out[i], err);
    }
    if (status == KVB_OK)
        status = decoder_run(f->s->decode, caches, n, n_rows, ids, NULL, LOGITS_ALL, f->cell_logits, err);
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) {
#pragma omp parallel for schedule(static)
        for (uint32_t row = 0; row < f->n_next; row++)
            measure_row(f, row, f->cell_logits + ((size_t)i * f->n_next + row) * vocabulary, &out[i]);
        out[i].seconds = (meter_now() - start) / n;
    }
    for (uint32_t i = 0; i < n; i++) {
        kv_cache_close(caches[i]);
        kv_cache_close(caches[n + i]);
        if (status != KVB_OK) fidelity_cell_free(&out[i]);
    }
    free_all(caches, n_rows, ids);
    return status;
}

// ---- Under a policy ----

typedef struct follower {
    kv_cache *caches[FIDELITY_POLICIES];
    decode_hooks hooks[FIDELITY_POLICIES];
    uint32_t ones[FIDELITY_POLICIES];
    int32_t ids[FIDELITY_POLICIES];
} follower;

static kvb_status begin_policy(fidelity *f, policy_run *run, kv_cache **cache, fidelity_cell *out, kvb_error *err)
{
    *out = fidelity_cell_open(f->n_next);
    *cache = policy_run_cache(run, f->s, 0);
    measure_cache(f, *cache, out);
    out->loss = evicted_importance(f, policy_run_kept(run));
    kv_cache_compact(*cache, f->n_next); // room for the continuation
    return policy_run_turn(run, *cache, err);
}

static kvb_status follow(fidelity *f, follower *w, uint32_t n, fidelity_cell *out, kvb_error *err)
{
    size_t vocabulary = f->s->m->config.vocabulary;
    for (uint32_t row = 0; row < f->n_next; row++) {
        for (uint32_t i = 0; i < n; i++) {
            w->ones[i] = 1;
            w->ids[i] = f->full.next[row];
        }
        kvb_status status =
            decoder_run(f->s->decode, w->caches, n, w->ones, w->ids, w->hooks, LOGITS_LAST, f->cell_logits, err);
        if (status != KVB_OK) return status;
#pragma omp parallel for schedule(static)
        for (uint32_t i = 0; i < n; i++) measure_row(f, row, f->cell_logits + i * vocabulary, &out[i]);
    }
    return KVB_OK;
}

kvb_status fidelity_follow(fidelity *f, policy_run *const *runs, uint32_t n, fidelity_cell *out, kvb_error *err)
{
    follower w = {0};
    double start = meter_now();
    kvb_status status = KVB_OK;
    memset(out, 0, n * sizeof *out);
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) {
        status = begin_policy(f, runs[i], &w.caches[i], &out[i], err);
        w.hooks[i] = policy_run_hooks(runs[i]);
    }
    if (status == KVB_OK) status = follow(f, &w, n, out, err);
    for (uint32_t i = 0; i < n; i++) {
        out[i].looked = policy_run_looked(runs[i]) / f->s->now.n_tokens;
        out[i].seconds = (meter_now() - start) / n;
        kv_cache_close(w.caches[i]);
        if (status != KVB_OK) fidelity_cell_free(&out[i]);
    }
    return status;
}
