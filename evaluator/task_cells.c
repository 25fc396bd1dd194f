#include "evaluator/task_cells.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

enum { ROWS = 512 }; // of the decoder: enough that all questions of a context go together

typedef struct cells_run {
    const model *m;
    const task *t;
    const task_sample *sample;
    const task_listener *answers;
    session *s;
    uint32_t n_tokens, extra, together;
    allocation budget;
    policy_run **runs; // [n cells], NULL where a cell has no policy
    task_cell *cells;
    size_t n;
} cells_run;

static size_t heads_of(const cells_run *r)
{
    return (size_t)r->m->config.n_layers * r->m->config.n_kv_heads;
}

static kvb_status find_budgets(cells_run *r, const task_cell *c, double ratio, const float *scores, uint32_t sink,
                               uint32_t window, kvb_error *err)
{
    const model_config *m = &r->m->config;
    const allocator_shape shape = {m->n_layers, m->n_heads, m->n_kv_heads};
    bool needs =
        c->how->kind == ALLOCATOR_ADA || c->how->kind == ALLOCATOR_ADA_ORIGINAL || c->how->kind == ALLOCATOR_ADA_GLOBAL;
    if (c->how->kind == ALLOCATOR_ORACLE || (needs && !scores))
        return kvb_fail(err, KVB_ARGUMENT, "allocator %s needs scores that %s; use uniform, pyramid, or a table",
                        c->how->label, c->p ? "are not there when a policy begins" : "a task does not have");
    return allocator_budgets(c->how, &shape, ratio, r->n_tokens, scores, sink, window, &r->budget, err);
}

static kvb_status open_policies(cells_run *r, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < r->n && status == KVB_OK; i++) {
        const task_cell *c = &r->cells[i];
        if (!c->p) continue;
        status = find_budgets(r, c, policy_capacity_ratio(c->p, c->ratio), NULL, 0, 0, err);
        if (status == KVB_OK)
            status = policy_run_open(&r->runs[i], c->p, r->m, r->budget.keep, c->ratio, r->n_tokens, r->extra, err);
    }
    return status;
}

static kvb_status prefill(cells_run *r, const int32_t *ids, kvb_error *err)
{
    policy_run **open = calloc(r->n + 1, sizeof *open);
    size_t n = 0;
    if (!open) return kvb_fail(err, KVB_MEMORY, "tasks: no memory for %zu cells", r->n);
    for (size_t i = 0; i < r->n; i++)
        if (r->runs[i]) open[n++] = r->runs[i];
    policy_watch watch = {open, n};
    layer_observer observer = policy_observer(&watch);
    kvb_status status = session_prefill(r->s, ids, r->n_tokens, n ? &observer : NULL, NULL, err);
    free(open);
    return status;
}

static kvb_status open_cache(cells_run *r, size_t i, kv_cache **cache, kvb_error *err)
{
    const task_cell *c = &r->cells[i];
    if (r->runs[i]) return policy_run_cache(r->runs[i], r->s, 0, cache, err);
    if (!c->how) return session_cache(r->s, NULL, 0, cache, err);
    const metric *m = &r->s->plan.metrics[c->metric];
    const float *scores = r->s->scores[c->metric];
    kept_set kept = {0};
    kvb_status status = find_budgets(r, c, c->ratio, scores, metric_protect_sink(m), metric_protect_window(m), err);
    if (status == KVB_OK) status = session_rank(r->s, c->metric, r->budget.keep, &scores, err);
    if (status == KVB_OK)
        status = session_select_each(r->s, scores, r->budget.keep, r->budget.sink, r->budget.window, &kept, err);
    if (status == KVB_OK) status = session_cache(r->s, &kept, 0, cache, err);
    kept_set_free(&kept);
    return status;
}

static kvb_status answer_cell(cells_run *r, size_t i, kvb_error *err)
{
    task_cell *c = &r->cells[i];
    kv_cache *cache = NULL;
    task_answers answers = {0};
    double all = (double)heads_of(r) * r->n_tokens;
    kvb_status status = open_cache(r, i, &cache, err);
    if (status == KVB_OK) {
        c->kept += (double)kv_cache_entries(cache) / all;
        status = task_answer(&answers, r->s->decode, r->m, cache, r->t, r->sample, r->runs[i], r->together, err);
    }
    if (status == KVB_OK) {
        c->looked += r->runs[i] ? policy_run_stats(r->runs[i]).looked / r->n_tokens : 0;
        c->score += answers.mean * (double)answers.n;
        c->n_questions += answers.n;
        c->n_samples++;
        if (r->answers) r->answers->hear(r->answers->context, c, r->sample, &answers);
    }
    task_answers_free(&answers);
    kv_cache_close(cache);
    return status;
}

static kvb_status open_run(cells_run *r, const metric *metrics, size_t n_metrics, kvb_error *err)
{
    size_t heads = heads_of(r);
    session_plan plan = {.max_tokens = r->n_tokens,
                         .max_new = r->extra,
                         .max_rows = r->extra > ROWS ? r->extra : ROWS,
                         .metrics = metrics,
                         .n_metrics = n_metrics};
    r->together = plan.max_rows / r->extra;
    r->runs = calloc(r->n + 1, sizeof(policy_run *));
    r->budget =
        (allocation){calloc(heads, sizeof(uint32_t)), calloc(heads, sizeof(uint32_t)), calloc(heads, sizeof(uint32_t))};
    if (!r->runs || !r->budget.keep || !r->budget.sink || !r->budget.window)
        return kvb_fail(err, KVB_MEMORY, "tasks: no memory for %zu cells of %zu heads", r->n, heads);
    return session_open(&r->s, r->m, &plan, err);
}

kvb_status task_cells_run(const model *m, const metric *metrics, size_t n_metrics, task_cell *cells, size_t n,
                          const task *t, const task_sample *sample, const task_listener *answers, kvb_error *err)
{
    cells_run r = {.m = m, .t = t, .sample = sample, .answers = answers, .cells = cells, .n = n};
    int32_t *ids = NULL;
    kvb_status status = task_context_ids(&ids, &r.n_tokens, m, sample, err);
    if (status == KVB_OK) status = task_positions(&r.extra, m, t, sample, err);
    if (status == KVB_OK) status = open_run(&r, metrics, n_metrics, err);
    if (status == KVB_OK) status = open_policies(&r, err);
    if (status == KVB_OK) status = prefill(&r, ids, err);
    for (size_t i = 0; i < n && status == KVB_OK; i++) status = answer_cell(&r, i, err);
    for (size_t i = 0; i < n && r.runs; i++) policy_run_close(r.runs[i]);
    session_close(r.s);
    free(r.runs);
    free(r.budget.keep);
    free(r.budget.sink);
    free(r.budget.window);
    free(ids);
    return status;
}
