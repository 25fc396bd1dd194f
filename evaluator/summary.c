#include "evaluator/summary.h"
#include "formats/need.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct summary_rows {
    const double **kl, **nll, **agree, **other; // [texts]
    double *agreements;                         // [texts, n]
    uint32_t *n, *n_less;                       // [texts] n, and n - 1
} summary_rows;

static summary_rows rows_open(const sweep *s)
{
    size_t n = s->n_texts;
    summary_rows r = {need(n, sizeof(double *), "texts"),
                      need(n, sizeof(double *), "texts"),
                      need(n, sizeof(double *), "texts"),
                      need(n, sizeof(double *), "texts"),
                      need(n * s->o.n_next, sizeof(double), "agreements"),
                      need(n, sizeof(uint32_t), "texts"),
                      need(n, sizeof(uint32_t), "texts")};
    for (uint32_t t = 0; t < n; t++) {
        r.n[t] = s->o.n_next;
        r.n_less[t] = s->o.n_next - 1;
    }
    return r;
}

static void rows_free(summary_rows *r)
{
    free(r->kl);
    free(r->nll);
    free(r->agree);
    free(r->other);
    free(r->agreements);
    free(r->n);
    free(r->n_less);
}

static bool is_uniform(const allocator *a)
{
    return a->kind == ALLOCATOR_UNIFORM;
}

static bool is_ada(const allocator *a)
{
    return a->kind == ALLOCATOR_ADA;
}

static bool is_published(const allocator *a)
{
    const char *shrink = a->kind == ALLOCATOR_TABLE ? kvb_table_metadata(a->table, "shrink") : NULL;
    return a->kind == ALLOCATOR_TABLE && !a->strict && strcmp(kvb_table_info(a->table)->aggregate, "mean_ratio") == 0 &&
           (!shrink || strtod(shrink, NULL) == 0);
}

// The cell of such an allocator beside cells[i] (same text, metric, ratio), or NULL.
static const sweep_cell *beside(const sweep *s, size_t i, bool (*is_wanted)(const allocator *))
{
    const sweep_cell *c = &s->cells[i];
    size_t per_text = s->n_cells / s->n_texts, first = i / per_text * per_text;
    for (size_t k = first; k < first + per_text; k++) {
        const sweep_cell *other = &s->cells[k];
        const method_column *column = &s->methods.columns[other->column];
        if (is_wanted(column->how) && column->method == s->methods.columns[c->column].method &&
            other->ratio == c->ratio)
            return other;
    }
    return NULL;
}

// The KL of cells[at] and of the same cell of all texts, as a ratio to another allocator's.
static interval ratio_to(const sweep *s, size_t at, bool (*is_wanted)(const allocator *), const value_groups *kl,
                         summary_rows *r)
{
    size_t per_text = s->n_cells / s->n_texts;
    for (uint32_t t = 0; t < s->n_texts; t++) {
        const sweep_cell *other = beside(s, at + t * per_text, is_wanted);
        if (!other) return (interval){NAN, NAN, NAN};
        r->other[t] = other->result.kl;
    }
    return interval_ratio(kl, r->other);
}

static void summarize_one(const sweep *s, size_t at, summary_rows *r, sweep_summary *out)
{
    size_t per_text = s->n_cells / s->n_texts;
    uint32_t n = s->o.n_next, L = s->m->config.n_layers, T = s->n_texts;
    const sweep_cell *first = &s->cells[at];
    *out = (sweep_summary){.column = first->column, .ratio = first->ratio};
    for (uint32_t t = 0; t < T; t++) {
        size_t i = at + t * per_text;
        const fidelity_cell *c = &s->cells[i].result;
        r->kl[t] = c->kl;
        r->nll[t] = c->nll;
        r->agree[t] = r->agreements + (size_t)t * n;
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
    out->kl = interval_positive(&kl);
    out->agree = interval_share(&agree);
    out->nll = interval_mean(&nll);
    out->to_uniform = ratio_to(s, at, is_uniform, &kl, r);
    out->to_ada = ratio_to(s, at, is_ada, &kl, r);
    out->to_published = ratio_to(s, at, is_published, &kl, r);
}

sweep_summary *sweep_summarize(const sweep *s, size_t *n)
{
    *n = s->n_cells / s->n_texts;
    sweep_summary *all = need(*n, sizeof *all, "summaries");
    summary_rows r = rows_open(s);
    for (size_t i = 0; i < *n; i++) summarize_one(s, i, &r, &all[i]);
    rows_free(&r);
    return all;
}
