#include "evaluator/summary.h"
#include "runtime/fail.h"
#include <gsl/gsl_errno.h>
#include <gsl/gsl_statistics_double.h>
#include <math.h>
#include <stdlib.h>

typedef struct rows {
    const double **kl, **nll, **agree, **uniform; // [texts]
    double *means, *agreements;                   // [texts], [texts, n]
    uint32_t *n, *n_less;                         // [texts] n, and n - 1
} rows;

static kvb_status rows_open(rows *r, const sweep *s, kvb_error *err)
{
    size_t n = s->n_texts;
    *r = (rows){calloc(n, sizeof(double *)), calloc(n, sizeof(double *)), calloc(n, sizeof(double *)),
                calloc(n, sizeof(double *)), calloc(n, sizeof(double)),   calloc(n * s->o.n_next, sizeof(double)),
                calloc(n, sizeof(uint32_t)), calloc(n, sizeof(uint32_t))};
    for (uint32_t t = 0; r->n && r->n_less && t < n; t++) {
        r->n[t] = s->o.n_next;
        r->n_less[t] = s->o.n_next - 1;
    }
    if (r->kl && r->nll && r->agree && r->uniform && r->means && r->agreements && r->n && r->n_less) return KVB_OK;
    return kvb_fail(err, KVB_MEMORY, "no memory for the summary of %zu texts", n);
}

static void rows_free(rows *r)
{
    free(r->kl);
    free(r->nll);
    free(r->agree);
    free(r->uniform);
    free(r->means);
    free(r->agreements);
    free(r->n);
    free(r->n_less);
}

// The cell of the uniform allocator beside cells[i] (same text, metric, ratio, protection), or NULL.
static const sweep_cell *uniform_beside(const sweep *s, size_t i)
{
    const sweep_cell *c = &s->cells[i];
    size_t per_text = s->n_cells / s->n_texts, first = i / per_text * per_text;
    for (size_t k = first; k < first + per_text; k++) {
        const sweep_cell *other = &s->cells[k];
        const method_column *column = &s->methods.columns[other->column];
        if (column->how->kind == ALLOCATOR_UNIFORM && column->method == s->methods.columns[c->column].method &&
            other->ratio == c->ratio && other->protect == c->protect)
            return other;
    }
    return NULL;
}

static void summarize_one(const sweep *s, size_t at, uint64_t seed, rows *r, sweep_summary *out)
{
    size_t per_text = s->n_cells / s->n_texts;
    uint32_t n = s->o.n_next, L = s->m->config.n_layers, T = s->n_texts;
    const sweep_cell *first = &s->cells[at];
    bool has_uniform = true;
    *out = (sweep_summary){.column = first->column, .ratio = first->ratio, .protect = first->protect};
    for (uint32_t t = 0; t < T; t++) {
        size_t i = at + t * per_text;
        const fidelity_cell *c = &s->cells[i].result;
        const sweep_cell *uniform = uniform_beside(s, i);
        r->kl[t] = c->kl;
        r->nll[t] = c->nll;
        r->agree[t] = r->agreements + (size_t)t * n;
        r->uniform[t] = uniform ? uniform->result.kl : NULL;
        has_uniform = has_uniform && uniform;
        r->means[t] = gsl_stats_mean(c->kl, 1, n);
        for (uint32_t k = 0; k < n; k++) r->agreements[(size_t)t * n + k] = c->agree[k];
        for (uint32_t l = 0; l < L; l++) out->output_error += c->output_error[l] / L / T;
        out->full_nll += c->full_nll / T;
        out->loss += c->loss / T;
        out->effective += c->ratio / T;
        out->looked += c->looked / T;
        out->bytes += (double)c->bytes / T;
        out->allocated += (double)c->allocated / T;
        out->seconds += c->seconds / T;
    }
    const value_groups kl = {r->kl, r->n, T}, agree = {r->agree, r->n, T}, nll = {r->nll, r->n_less, T};
    out->kl = interval_mean(&kl, seed);
    out->kl_texts = interval_student(r->means, T);
    out->agree = interval_mean(&agree, seed);
    out->nll = interval_mean(&nll, seed);
    out->to_uniform = has_uniform ? interval_ratio(&kl, r->uniform, seed) : (interval){NAN, NAN, NAN};
}

kvb_status sweep_summarize(const sweep *s, uint64_t seed, sweep_summary **out, size_t *n, kvb_error *err)
{
    rows r;
    *n = s->n_cells / s->n_texts;
    *out = calloc(*n, sizeof **out);
    gsl_error_handler_t *before = gsl_set_error_handler_off(); // memory alone can fail, and is checked
    kvb_status status = rows_open(&r, s, err);
    if (status == KVB_OK && !*out) status = kvb_fail(err, KVB_MEMORY, "no memory for %zu summaries", *n);
    for (size_t i = 0; status == KVB_OK && i < *n; i++) summarize_one(s, i, seed, &r, &(*out)[i]);
    gsl_set_error_handler(before);
    rows_free(&r);
    if (status == KVB_OK) return KVB_OK;
    free(*out);
    *out = NULL;
    return status;
}
