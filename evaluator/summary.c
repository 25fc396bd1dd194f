#include "evaluator/summary.h"
#include "runtime/fail.h"
#include <gsl/gsl_cdf.h>
#include <gsl/gsl_errno.h>
#include <gsl/gsl_rng.h>
#include <gsl/gsl_sort.h>
#include <gsl/gsl_statistics_double.h>
#include <math.h>
#include <stdlib.h>

static double mean_of(const double *const *values, uint32_t n_texts, uint32_t n)
{
    double sum = 0;
    for (uint32_t t = 0; t < n_texts; t++)
        for (uint32_t i = 0; i < n; i++) sum += values[t][i];
    return sum / ((double)n_texts * n);
}

// b may be NULL: then the mean of a, else the ratio of the means.
static interval bootstrap(const double *const *a, const double *const *b, uint32_t n_texts, uint32_t n, uint64_t seed)
{
    double resampled[SUMMARY_RESAMPLES], center = mean_of(a, n_texts, n) / (b ? mean_of(b, n_texts, n) : 1);
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_taus2);
    if (!rng) return (interval){center, NAN, NAN};
    gsl_rng_set(rng, (unsigned long)(seed + 1));
    for (int r = 0; r < SUMMARY_RESAMPLES; r++) {
        double sum = 0, other = 0;
        for (uint32_t t = 0; t < n_texts; t++) {
            size_t text = gsl_rng_uniform_int(rng, n_texts);
            for (uint32_t i = 0; i < n; i++) {
                size_t at = gsl_rng_uniform_int(rng, n);
                sum += a[text][at];
                if (b) other += b[text][at];
            }
        }
        resampled[r] = b ? sum / other : sum / ((double)n_texts * n);
    }
    gsl_rng_free(rng);
    gsl_sort(resampled, 1, SUMMARY_RESAMPLES);
    return (interval){center, gsl_stats_quantile_from_sorted_data(resampled, 1, SUMMARY_RESAMPLES, 0.025),
                      gsl_stats_quantile_from_sorted_data(resampled, 1, SUMMARY_RESAMPLES, 0.975)};
}

interval interval_mean(const double *const *values, uint32_t n_texts, uint32_t n, uint64_t seed)
{
    return bootstrap(values, NULL, n_texts, n, seed);
}

interval interval_ratio(const double *const *a, const double *const *b, uint32_t n_texts, uint32_t n, uint64_t seed)
{
    return bootstrap(a, b, n_texts, n, seed);
}

interval interval_texts(const double *values, uint32_t n_texts)
{
    double mean = gsl_stats_mean(values, 1, n_texts);
    if (n_texts < 2) return (interval){mean, NAN, NAN};
    double error = gsl_stats_sd(values, 1, n_texts) / sqrt(n_texts);
    double half = gsl_cdf_tdist_Pinv(0.975, n_texts - 1) * error;
    return (interval){mean, mean - half, mean + half};
}

// ---- Over the cells ----

typedef struct rows {
    const double **kl, **nll, **agree, **uniform; // [texts]
    double *means, *agreements;                   // [texts], [texts, n]
} rows;

static kvb_status rows_open(rows *r, const sweep *s, kvb_error *err)
{
    size_t n = s->n_texts;
    *r = (rows){calloc(n, sizeof(double *)), calloc(n, sizeof(double *)), calloc(n, sizeof(double *)),
                calloc(n, sizeof(double *)), calloc(n, sizeof(double)),   calloc(n * s->o.n_next, sizeof(double))};
    if (r->kl && r->nll && r->agree && r->uniform && r->means && r->agreements) return KVB_OK;
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
}

// The cell of the uniform allocator beside cells[i] (same text, metric, ratio, protection), or NULL.
static const sweep_cell *uniform_beside(const sweep *s, size_t i)
{
    const sweep_cell *c = &s->cells[i];
    size_t per_text = s->n_cells / s->n_texts, first = i / per_text * per_text;
    for (size_t k = first; k < first + per_text; k++) {
        const sweep_cell *other = &s->cells[k];
        const sweep_column *column = &s->columns[other->column];
        if (column->how->kind == ALLOCATOR_UNIFORM && column->metric == s->columns[c->column].metric &&
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
        out->bytes += (double)c->bytes / T;
        out->allocated += (double)c->allocated / T;
        out->seconds += c->seconds / T;
    }
    out->kl = interval_mean(r->kl, T, n, seed);
    out->kl_texts = interval_texts(r->means, T);
    out->agree = interval_mean(r->agree, T, n, seed);
    out->nll = interval_mean(r->nll, T, n - 1, seed);
    out->to_uniform = has_uniform ? interval_ratio(r->kl, r->uniform, T, n, seed) : (interval){NAN, NAN, NAN};
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
