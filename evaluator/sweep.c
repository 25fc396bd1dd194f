#include "evaluator/sweep.h"
#include "evaluator/sweep_log.h"
#include "formats/atomic_file.h"
#include "formats/sha256.h"
#include "profiler/meter.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- The cells ----

// Everything that a result depends on, as text; its hash names the result in the log.
static kvb_status name_cell(const sweep *s, sweep_cell *c, kvb_error *err)
{
    const sweep_column *column = &s->columns[c->column];
    const sweep_metric *m = &s->metrics[column->metric];
    char text[1024];
    int n = snprintf(text, sizeof text, "kvbudget-eval 2\n%s\n%s %s\n%s\n%u %u\n%s\n%s\n%.17g\n%u %u", s->m->sha256,
                     s->m->device->name, s->m->device->compute, s->texts[c->text].sha256, s->o.n_tokens, s->o.n_next, m->m.spec,
                     column->how->identity, c->ratio, c->protect ? m->sink : 0, c->protect ? m->window : 0);
    return sha256_hex(text, (size_t)n, c->key, err);
}

kvb_status sweep_open(sweep *s, const double *ratios, size_t n_ratios, bool both, kvb_error *err)
{
    size_t per_text = (size_t)s->n_columns * n_ratios * (both ? 2 : 1);
    for (uint32_t t = 0; t < s->n_texts; t++)
        if (s->texts[t].n_ids < (uint64_t)s->o.n_tokens + s->o.n_next)
            return kvb_fail(err, KVB_ARGUMENT, "%s: %u tokens, expected at least %u of context and %u to go on with",
                            s->texts[t].name, s->texts[t].n_ids, s->o.n_tokens, s->o.n_next);
    s->n_cells = per_text * s->n_texts;
    s->cells = calloc(s->n_cells + 1, sizeof *s->cells);
    if (!s->cells) return kvb_fail(err, KVB_MEMORY, "no memory for %zu runs", s->n_cells);
    kvb_status status = KVB_OK;
    size_t i = 0;
    for (uint32_t t = 0; t < s->n_texts; t++)
        for (uint32_t column = 0; column < s->n_columns; column++)
            for (size_t r = 0; r < n_ratios; r++)
                for (int bare = 0; bare <= (both ? 1 : 0) && status == KVB_OK; bare++) {
                    s->cells[i] = (sweep_cell){.text = t, .column = column, .ratio = ratios[r], .protect = !bare};
                    status = name_cell(s, &s->cells[i++], err);
                }
    return status == KVB_OK && s->o.log ? sweep_log_read(s, err) : status;
}

void sweep_close(sweep *s)
{
    for (size_t i = 0; s->cells && i < s->n_cells; i++) fidelity_cell_free(&s->cells[i].result);
    free(s->cells);
    s->cells = NULL;
}

// ---- Running ----

typedef struct sweep_run_state {
    sweep *s;
    session *session;
    fidelity *f;
    sweep_log *log;
    atomic_file kept;
    const sweep_watch *watch;
    size_t n_done;     // cells, for the progress
    allocation budget; // scratch [L*G]
} sweep_run_state;

static bool report(sweep_run_state *r, double part)
{
    return !r->watch || !r->watch->progress ||
           r->watch->progress(r->watch->context, (double)r->n_done + part, (double)r->s->n_cells);
}

// A prefill shows as progress of up to one cell, so that the bar moves.
static bool prefill_step(void *context, double done, double total)
{
    return report(context, 0.99 * done / total);
}

static kvb_status select_cell(sweep_run_state *r, const sweep_cell *c, kept_set *kept, kvb_error *err)
{
    const sweep *s = r->s;
    const model_config *config = &s->m->config;
    const sweep_column *column = &s->columns[c->column];
    const sweep_metric *m = &s->metrics[column->metric];
    const allocator_shape shape = {config->n_layers, config->n_heads, config->n_kv_heads};
    const float *scores = column->how->kind == ALLOCATOR_ORACLE ? r->f->importance : r->session->scores[column->metric];
    kvb_status status = allocator_budgets(column->how, &shape, c->ratio, s->o.n_tokens, scores,
                                          c->protect ? m->sink : 0, c->protect ? m->window : 0, &r->budget, err);
    if (status == KVB_OK && column->how->kind != ALLOCATOR_ORACLE)
        status = session_rank(r->session, column->metric, r->budget.keep, &scores, err);
    if (status != KVB_OK) return status;
    return session_select_each(r->session, scores, r->budget.keep, r->budget.sink, r->budget.window, kept, err);
}

// Measures cells[0..n-1] of one text together.
static kvb_status run_batch(sweep_run_state *r, sweep_cell *const *cells, uint32_t n, kvb_error *err)
{
    kept_set *kept = calloc(n, sizeof *kept);
    fidelity_cell *results = calloc(n, sizeof *results);
    kvb_status status = kept && results ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for %u runs at a time", n);
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) status = select_cell(r, cells[i], &kept[i], err);
    if (status == KVB_OK) status = fidelity_measure(r->f, kept, n, results, err);
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) {
        cells[i]->result = results[i];
        cells[i]->done = true;
        if (r->kept.stream) status = sweep_write_kept(r->kept.stream, r->s, cells[i], &kept[i], err);
        if (status == KVB_OK && r->log) status = sweep_log_add(r->log, r->s, cells[i], err);
    }
    for (uint32_t i = 0; kept && i < n; i++) kept_set_free(&kept[i]);
    free(kept);
    free(results);
    return status;
}

static kvb_status run_text(sweep_run_state *r, uint32_t text, kvb_error *err)
{
    sweep *s = r->s;
    size_t first = s->n_cells / s->n_texts * text, end = first + s->n_cells / s->n_texts;
    sweep_cell *batch[64];
    uint32_t n = 0, missing = 0;
    for (size_t i = first; i < end; i++) missing += !s->cells[i].done;
    if (!missing) return KVB_OK;
    double start = meter_now();
    forward_progress progress = {prefill_step, r};
    kvb_status status = fidelity_begin(r->f, s->texts[text].ids, s->o.n_tokens, &progress, err);
    s->prefill_seconds += meter_now() - start;
    start = meter_now();
    for (size_t i = first; i < end && status == KVB_OK; i++) {
        if (!s->cells[i].done) batch[n++] = &s->cells[i];
        if (n < r->f->batch && (i + 1 < end || n == 0)) continue;
        status = run_batch(r, batch, n, err);
        r->n_done += n;
        s->n_measured += n;
        n = 0;
        if (status == KVB_OK && !report(r, 0))
            status = kvb_fail(err, KVB_INTERRUPTED, "stopped after %zu of %zu runs; the same command goes on",
                              r->n_done, s->n_cells);
    }
    s->cell_seconds += meter_now() - start;
    return status;
}

static kvb_status open_outputs(sweep_run_state *r, kvb_error *err)
{
    sweep *s = r->s;
    size_t heads = (size_t)s->m->config.n_layers * s->m->config.n_kv_heads;
    r->budget =
        (allocation){calloc(heads, sizeof(uint32_t)), calloc(heads, sizeof(uint32_t)), calloc(heads, sizeof(uint32_t))};
    if (!r->budget.keep || !r->budget.sink || !r->budget.window)
        return kvb_fail(err, KVB_MEMORY, "no memory for %zu budgets", heads);
    kvb_status status = s->o.kept ? atomic_file_begin(&r->kept, s->o.kept, err) : KVB_OK;
    return status == KVB_OK && s->o.log ? sweep_log_open(&r->log, s->o.log, err) : status;
}

kvb_status sweep_run(sweep *s, const sweep_watch *watch, kvb_error *err)
{
    sweep_run_state r = {.s = s, .watch = watch};
    metric *metrics = calloc(s->n_metrics + 1, sizeof *metrics);
    kvb_status status = metrics ? open_outputs(&r, err) : kvb_fail(err, KVB_MEMORY, "no memory for the metrics");
    uint32_t batch = s->o.batch < 1 ? 1 : s->o.batch > 64 ? 64 : s->o.batch;
    for (uint32_t i = 0; metrics && i < s->n_metrics; i++) metrics[i] = s->metrics[i].m;
    for (size_t i = 0; i < s->n_cells; i++) r.n_done += s->cells[i].done;
    if (status == KVB_OK && r.n_done < s->n_cells) {
        session_plan plan = {s->o.n_tokens, s->o.n_next, batch * s->o.n_next, metrics, s->n_metrics, true};
        status = session_open(&r.session, s->m, &plan, err);
        if (status == KVB_OK) status = fidelity_open(&r.f, r.session, s->o.n_next, batch, err);
        for (uint32_t t = 0; t < s->n_texts && status == KVB_OK; t++) status = run_text(&r, t, err);
    }
    if (r.session) s->score_seconds = r.session->score_seconds;
    fidelity_close(r.f);
    session_close(r.session);
    sweep_log_close(r.log);
    if (status == KVB_OK && r.kept.stream) status = atomic_file_commit(&r.kept, err);
    atomic_file_abandon(&r.kept);
    free(r.budget.keep);
    free(r.budget.sink);
    free(r.budget.window);
    free(metrics);
    return status;
}
