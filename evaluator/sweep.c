#include "evaluator/sweep.h"
#include "formats/atomic_file.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/backend/meter.h"
#include "runtime/fail.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH_MAX = 64 };

// ---- The cells ----

// Everything that a result depends on, as text; its hash names the result in the log.
static void name_cell(const sweep *s, sweep_cell *c)
{
    const method_column *column = &s->methods.columns[c->column];
    const method *m = &s->methods.methods[column->method];
    char text[1024];
    int n = snprintf(text, sizeof text, "kvbudget-eval 3\n%s\n%s %s\n%s\n%u %u\n%s\n%s\n%.17g\n%u %u", s->m->sha256,
                     s->m->device->b->name, s->m->device->b->compute, s->texts[c->text].sha256, s->o.n_tokens,
                     s->o.n_next, method_name(m), column->how->identity, c->ratio, m->sink, m->window);
    if (s->o.refit) n += snprintf(text + n, sizeof text - (size_t)n, "\nrefit 3 %u", s->o.refit);
    sha256_hex(text, (size_t)n, c->key);
}

static bool is_policy(const sweep *s, uint32_t column)
{
    return s->methods.methods[s->methods.columns[column].method].p.kind != NULL;
}

kvb_status sweep_open(sweep *s, const double *ratios, size_t n_ratios, kvb_error *err)
{
    for (uint32_t t = 0; t < s->n_texts; t++)
        if (s->texts[t].n_ids < (uint64_t)s->o.n_tokens + s->o.n_next)
            return kvb_fail(err, KVB_ARGUMENT, "%s: %u tokens, expected at least %u of context and %u to continue with",
                            s->texts[t].name, s->texts[t].n_ids, s->o.n_tokens, s->o.n_next);
    s->n_cells = s->n_texts * s->methods.n_columns * n_ratios;
    s->cells = need(s->n_cells, sizeof *s->cells, "runs");
    size_t i = 0;
    for (uint32_t t = 0; t < s->n_texts; t++)
        for (uint32_t column = 0; column < s->methods.n_columns; column++)
            for (size_t r = 0; r < n_ratios; r++) {
                s->cells[i] = (sweep_cell){.text = t, .column = column, .ratio = ratios[r]};
                name_cell(s, &s->cells[i++]);
            }
    kvb_status status = s->o.log ? log_open(&s->log, s->o.log, err) : KVB_OK;
    return status == KVB_OK && !s->o.kept ? sweep_take(s, err) : status;
}

void sweep_close(sweep *s)
{
    for (size_t i = 0; s->cells && i < s->n_cells; i++) fidelity_cell_free(&s->cells[i].result);
    free(s->cells);
    s->cells = NULL;
    (void)log_close(s->log, KVB_OK, NULL); // every line was synced when it was added
    s->log = NULL;
}

// ---- The log ----

// Reads a cell's result from the log, if it is there.
static kvb_status read_result(const sweep *s, sweep_cell *cell, kvb_error *err)
{
    static const char *const NAMES[] = {"kept", "bytes", "allocated", "effective_ratio", "loss", "seconds", "full_nll"};
    enum { VALUES = sizeof NAMES / sizeof *NAMES };
    const cJSON *line = log_find(s->log, cell->key);
    uint32_t n = s->o.n_next;
    double values[VALUES];
    fidelity_cell *c = &cell->result;
    bool good = true;
    if (!line) return KVB_OK;
    *c = fidelity_cell_open(n);
    for (int i = 0; i < VALUES; i++) {
        values[i] = log_number(line, NAMES[i]);
        good = good && values[i] >= 0 && values[i] < 0x1p53;
    }
    good = good && log_numbers(c->kl, n, line, "kl") && log_numbers(c->nll, n - 1, line, "nll") &&
           log_numbers(c->agree, n, line, "agree");
    c->kept = good ? (uint64_t)values[0] : 0;
    c->bytes = good ? (uint64_t)values[1] : 0;
    c->allocated = good ? (uint64_t)values[2] : 0;
    c->ratio = values[3];
    c->loss = values[4];
    c->seconds = values[5];
    c->full_nll = values[6];
    c->looked = log_number(line, "looked");
    cell->done = good;
    if (good) return KVB_OK;
    fidelity_cell_free(c);
    return log_refuse(s->log, cell->key, err);
}

kvb_status sweep_take(sweep *s, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < s->n_cells && status == KVB_OK; i++) status = read_result(s, &s->cells[i], err);
    return status;
}

static cJSON *describe_cell(const sweep *s, const sweep_cell *c)
{
    const method_column *column = &s->methods.columns[c->column];
    const method *m = &s->methods.methods[column->method];
    cJSON *line = cJSON_CreateObject();
    json_put(line, "key %s text %s metric %s allocator %s ratio %g sink %u window %u", c->key, s->texts[c->text].name,
             method_name(m), column->how->label, c->ratio, m->sink, m->window);
    if (s->o.refit) json_put(line, "refit %u", s->o.refit);
    return line;
}

static kvb_status add_result(sweep *s, const sweep_cell *cell, kvb_error *err)
{
    const fidelity_cell *r = &cell->result;
    uint32_t n = s->o.n_next;
    if (log_find(s->log, cell->key)) return KVB_OK; // measured again for its kept positions
    cJSON *line = describe_cell(s, cell);
    log_put_numbers(line, "agree", r->agree, n);
    json_put(line, "kept %g bytes %g allocated %g", (double)r->kept, (double)r->bytes, (double)r->allocated);
    log_put_number(line, "effective_ratio", r->ratio);
    log_put_number(line, "loss", r->loss);
    log_put_number(line, "looked", r->looked);
    log_put_number(line, "seconds", r->seconds);
    log_put_number(line, "full_nll", r->full_nll);
    log_put_numbers(line, "kl", r->kl, n);
    log_put_numbers(line, "nll", r->nll, n - 1);
    return log_add(s->log, &line, 1, err);
}

// Writes one line for tests/peer/eval_parity.py: ids of text and continuation, and the kept positions of every head.
static kvb_status write_kept(FILE *out, const sweep *s, const sweep_cell *cell, const kept_set *kept, kvb_error *err)
{
    cJSON *line = describe_cell(s, cell);
    char *text = cJSON_PrintUnformatted(line);
    cJSON_Delete(line);
    double kl = 0;
    for (uint32_t i = 0; i < s->o.n_next; i++) kl += cell->result.kl[i] / s->o.n_next;
    fprintf(out, "%.*s,\"kl\":%.9g,\"n_tokens\":%u,\"n_next\":%u,\"ids\":[", (int)strlen(text) - 1, text, kl,
            s->o.n_tokens, s->o.n_next);
    cJSON_free(text);
    const int32_t *ids = s->texts[cell->text].ids;
    for (uint32_t i = 0; i < s->o.n_tokens + s->o.n_next; i++) fprintf(out, i ? ",%d" : "%d", ids[i]);
    fprintf(out, "],\"kept\":[");
    for (uint32_t h = 0; h < kept->n_heads; h++) {
        fprintf(out, h ? ",[" : "[");
        for (size_t i = kept->offsets[h]; i < kept->offsets[h + 1]; i++)
            fprintf(out, i > kept->offsets[h] ? ",%u" : "%u", kept->positions[i]);
        fprintf(out, "]");
    }
    fprintf(out, "]}\n");
    return ferror(out) ? kvb_fail(err, KVB_IO, "kept positions cannot be written: %s", strerror(errno)) : KVB_OK;
}

// ---- Running ----

typedef struct sweep_run_state {
    sweep *s;
    session *session;
    fidelity *f;
    atomic_file kept;
    const sweep_watch *watch;
    size_t n_done;     // cells, for the progress
    policy_run **runs; // [n_cells / n_texts] of the present text's cells; NULL for cells without a policy
} sweep_run_state;

static bool report_progress(sweep_run_state *r, double part)
{
    return !r->watch || !r->watch->progress ||
           r->watch->progress(r->watch->context, (double)r->n_done + part, (double)r->s->n_cells);
}

// Reports a prefill as progress of up to one cell, so that the bar moves.
static bool prefill_step(void *context, double done, double total)
{
    return report_progress(context, 0.99 * done / total);
}

static kvb_status keep_result(sweep_run_state *r, sweep_cell *c, const fidelity_cell *result, const kept_set *kept,
                              kvb_error *err)
{
    c->result = *result;
    c->done = true;
    kvb_status status = r->kept.stream ? write_kept(r->kept.stream, r->s, c, kept, err) : KVB_OK;
    return status == KVB_OK && r->s->log ? add_result(r->s, c, err) : status;
}

// Measures cells[0..n-1] of one text together: cells that evict once.
static kvb_status run_batch(sweep_run_state *r, sweep_cell *const *cells, uint32_t n, kvb_error *err)
{
    const sweep *s = r->s;
    kept_set *kept = need(n, sizeof *kept, "runs");
    fidelity_cell *results = need(n, sizeof *results, "runs");
    kvb_status status = KVB_OK;
    for (uint32_t i = 0; i < n && status == KVB_OK; i++)
        status = method_select(r->session, &s->methods, &s->methods.columns[cells[i]->column], cells[i]->ratio,
                               r->f->importance, &kept[i], err);
    if (status == KVB_OK) status = fidelity_measure(r->f, kept, n, results, err);
    for (uint32_t i = 0; i < n && status == KVB_OK; i++) status = keep_result(r, cells[i], &results[i], &kept[i], err);
    for (uint32_t i = 0; i < n; i++) kept_set_free(&kept[i]);
    free_all(kept, results);
    return status;
}

// Measures cells with policies together.
static kvb_status run_policies(sweep_run_state *r, sweep_cell *const *cells, policy_run *const *runs, uint32_t n,
                               kvb_error *err)
{
    fidelity_cell results[FIDELITY_POLICIES];
    kvb_status status = fidelity_follow(r->f, runs, n, results, err);
    for (uint32_t i = 0; i < n && status == KVB_OK; i++)
        status = keep_result(r, cells[i], &results[i], policy_run_kept(runs[i]), err);
    return status;
}

// Cells of one text that are waiting to be measured together.
typedef struct sweep_batch {
    sweep_cell *cells[BATCH_MAX];
    policy_run *runs[FIDELITY_POLICIES];
    uint32_t n;
} sweep_batch;

static kvb_status flush_batch(sweep_run_state *r, sweep_batch *b, bool policies, kvb_error *err)
{
    uint32_t n = b->n;
    if (n == 0) return KVB_OK;
    kvb_status status = policies ? run_policies(r, b->cells, b->runs, n, err) : run_batch(r, b->cells, n, err);
    b->n = 0;
    if (status != KVB_OK) return status;
    r->n_done += n;
    r->s->n_measured += n;
    if (report_progress(r, 0)) return KVB_OK;
    return kvb_fail(err, KVB_INTERRUPTED, "stopped after %zu of %zu runs%s", r->n_done, r->s->n_cells,
                    r->s->log ? "; the same command continues" : "");
}

// Measures the missing cells of a text in batches, first those without a policy.
static kvb_status run_cells(sweep_run_state *r, sweep_cell *cells, size_t n, kvb_error *err)
{
    sweep_batch b = {.n = 0};
    kvb_status status = KVB_OK;
    for (int policies = 0; policies < 2; policies++) {
        uint32_t full = policies ? FIDELITY_POLICIES : r->f->batch;
        for (size_t i = 0; i < n && status == KVB_OK; i++) {
            if (cells[i].done || is_policy(r->s, cells[i].column) != policies) continue;
            if (policies) b.runs[b.n] = r->runs[i];
            b.cells[b.n++] = &cells[i];
            if (b.n == full) status = flush_batch(r, &b, policies, err);
        }
        if (status == KVB_OK) status = flush_batch(r, &b, policies, err);
    }
    return status;
}

// Opens the policies of a text's missing cells and lists them in `open` [n]; *n_open of them.
static kvb_status open_policies(sweep_run_state *r, const sweep_cell *cells, size_t n, policy_run **open,
                                size_t *n_open, kvb_error *err)
{
    const sweep *s = r->s;
    kvb_status status = KVB_OK;
    *n_open = 0;
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        if (cells[i].done || !is_policy(s, cells[i].column)) continue;
        status = method_policy(&r->runs[i], s->m, &s->methods, &s->methods.columns[cells[i].column], cells[i].ratio,
                               s->o.n_tokens, s->o.n_next, err);
        if (status == KVB_OK) open[(*n_open)++] = r->runs[i];
    }
    return status;
}

static kvb_status run_text(sweep_run_state *r, uint32_t text, kvb_error *err)
{
    sweep *s = r->s;
    size_t n = s->n_cells / s->n_texts, n_open = 0;
    sweep_cell *cells = &s->cells[n * text];
    uint32_t missing = 0;
    for (size_t i = 0; i < n; i++) missing += !cells[i].done;
    if (!missing) return KVB_OK;
    policy_run **open = need(n, sizeof *open, "runs");
    kvb_status status = open_policies(r, cells, n, open, &n_open, err);
    policy_watch watch = {open, n_open};
    layer_observer observer = policy_observer(&watch);
    forward_progress progress = {prefill_step, r};
    double start = meter_now();
    if (status == KVB_OK)
        status = fidelity_begin(r->f, s->texts[text].ids, s->o.n_tokens, n_open ? &observer : NULL, &progress, err);
    s->prefill_seconds += meter_now() - start;
    start = meter_now();
    if (status == KVB_OK) status = run_cells(r, cells, n, err);
    s->cell_seconds += meter_now() - start;
    for (size_t i = 0; i < n; i++) {
        policy_run_close(r->runs[i]);
        r->runs[i] = NULL;
    }
    free(open);
    return status;
}

kvb_status sweep_run(sweep *s, const sweep_watch *watch, kvb_error *err)
{
    sweep_run_state r = {.s = s, .watch = watch};
    size_t n_metrics;
    metric *metrics = method_metrics(&n_metrics, &s->methods);
    uint32_t batch = s->o.batch < 1 ? 1 : s->o.batch > BATCH_MAX ? BATCH_MAX : s->o.batch;
    uint32_t rows = batch * s->o.n_next; // a batch, or a step of all policies
    if (rows < FIDELITY_POLICIES) rows = FIDELITY_POLICIES;
    r.runs = need(s->n_cells / (s->n_texts ? s->n_texts : 1), sizeof(policy_run *), "runs");
    kvb_status status = s->o.kept ? atomic_file_begin(&r.kept, s->o.kept, err) : KVB_OK;
    for (size_t i = 0; i < s->n_cells; i++) r.n_done += s->cells[i].done;
    if (status == KVB_OK && r.n_done < s->n_cells) {
        session_plan plan = {
            s->o.n_tokens, s->o.n_next, rows, metrics, n_metrics, true, method_needs_attention(&s->methods),
            s->o.refit};
        status = session_open(&r.session, s->m, &plan, err);
        if (status == KVB_OK) status = fidelity_open(&r.f, r.session, s->o.n_next, batch, err);
        for (uint32_t t = 0; t < s->n_texts && status == KVB_OK; t++) status = run_text(&r, t, err);
    }
    if (r.session) s->score_seconds = r.session->score_seconds;
    if (r.session) s->refit_seconds = r.session->refit_seconds;
    fidelity_close(r.f);
    session_close(r.session);
    if (status == KVB_OK && r.kept.stream) status = atomic_file_commit(&r.kept, err);
    atomic_file_abandon(&r.kept);
    free_all(r.runs, metrics);
    return status;
}

// ---- The summary ----

typedef struct summary_rows {
    const double **kl, **nll, **agree, **other; // [texts]
    uint32_t *n, *n_less;                       // [texts] n_next, and n_next - 1
} summary_rows;

static summary_rows rows_open(const sweep *s)
{
    size_t n = s->n_texts;
    const double **lists = need(4 * n, sizeof *lists, "texts");
    uint32_t *counts = need(2 * n, sizeof *counts, "texts");
    summary_rows r = {lists, lists + n, lists + 2 * n, lists + 3 * n, counts, counts + n};
    for (uint32_t t = 0; t < n; t++) {
        r.n[t] = s->o.n_next;
        r.n_less[t] = s->o.n_next - 1;
    }
    return r;
}

// Whether the allocator is of that kind. A table counts only if it was solved as published.
static bool is_rival(const allocator *a, allocator_kind kind)
{
    if (a->kind != kind || kind != ALLOCATOR_TABLE) return a->kind == kind;
    const char *shrink = kvb_table_metadata(a->table, "shrink");
    return !a->strict && strcmp(kvb_table_info(a->table)->aggregate, "mean_ratio") == 0 &&
           (!shrink || strtod(shrink, NULL) == 0);
}

// Returns the cell with the text, metric and ratio of cells[i] whose allocator is of the kind `rival`, or NULL.
static const sweep_cell *beside(const sweep *s, size_t i, allocator_kind rival)
{
    const sweep_cell *c = &s->cells[i];
    size_t per_text = s->n_cells / s->n_texts, first = i / per_text * per_text;
    for (size_t k = first; k < first + per_text; k++) {
        const sweep_cell *other = &s->cells[k];
        const method_column *column = &s->methods.columns[other->column];
        if (is_rival(column->how, rival) && column->method == s->methods.columns[c->column].method &&
            other->ratio == c->ratio)
            return other;
    }
    return NULL;
}

// Returns the KL of cells[at], and of the same cell of all texts, divided by another allocator's; NaN without one.
static interval ratio_to(const sweep *s, size_t at, allocator_kind rival, const value_groups *kl, summary_rows *r)
{
    size_t per_text = s->n_cells / s->n_texts;
    for (uint32_t t = 0; t < s->n_texts; t++) {
        const sweep_cell *other = beside(s, at + t * per_text, rival);
        if (!other) return (interval){NAN, NAN, NAN};
        r->other[t] = other->result.kl;
    }
    return interval_ratio(kl, r->other);
}

static void summarize_one(const sweep *s, size_t at, summary_rows *r, sweep_summary *out)
{
    size_t per_text = s->n_cells / s->n_texts;
    uint32_t T = s->n_texts;
    const sweep_cell *first = &s->cells[at];
    *out = (sweep_summary){.column = first->column, .ratio = first->ratio};
    for (uint32_t t = 0; t < T; t++) {
        size_t i = at + t * per_text;
        const fidelity_cell *c = &s->cells[i].result;
        r->kl[t] = c->kl;
        r->nll[t] = c->nll;
        r->agree[t] = c->agree;
        out->full_nll += c->full_nll / T;
        out->loss += c->loss / T;
        out->effective += c->ratio / T;
        out->looked += c->looked / T;
        out->bytes += (double)c->bytes / T;
        out->allocated += (double)c->allocated / T;
        out->seconds += c->seconds / T;
    }
    const value_groups kl = {r->kl, r->n, T}, agree = {r->agree, r->n, T}, nll = {r->nll, r->n_less, T};
    out->kl = interval_positive(&kl);
    out->agree = interval_share(&agree);
    out->nll = interval_mean(&nll);
    out->to_uniform = ratio_to(s, at, ALLOCATOR_UNIFORM, &kl, r);
    out->to_ada = ratio_to(s, at, ALLOCATOR_ADA, &kl, r);
    out->to_published = ratio_to(s, at, ALLOCATOR_TABLE, &kl, r);
}

sweep_summary *sweep_summarize(const sweep *s, size_t *n)
{
    *n = s->n_cells / s->n_texts;
    sweep_summary *all = need(*n, sizeof *all, "summaries");
    summary_rows r = rows_open(s);
    for (size_t i = 0; i < *n; i++) summarize_one(s, i, &r, &all[i]);
    free_all(r.kl, r.n); // the other lists are parts of these two
    return all;
}
