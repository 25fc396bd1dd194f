// Normal equations are gathered once over all columns; a set of metrics is a part of them, a fold left out is a
// subtraction. So a trial costs no second look at the tokens before it ranks.
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/learn_parts.h"
#include <gsl/gsl_errno.h>
#include <gsl/gsl_linalg.h>
#include <math.h>
#include <stdlib.h>

enum { COLUMNS_MAX = 3 * KVB_RANK_FEATURES_MAX + 2 };

static const double TARGET_FLOOR = 1e-3; // of the mean importance: what a token without any counts as

uint32_t learn_columns(uint32_t n_features, bool layer_mean)
{
    return (layer_mean ? 3 : 2) * n_features + 2;
}

static size_t columns_of(const learn_systems *s)
{
    return learn_columns(s->n_features, s->layer_mean);
}

learn_systems learn_systems_init(const learned *l, double exponent)
{
    record_shape model = record_get_shape(l->from->r);
    learn_systems s = {.n_folds = l->n_folds,
                       .n_heads = model.n_layers * model.n_kv_heads,
                       .n_features = (uint32_t)l->from->n_metrics,
                       .layer_mean = l->options.layer_mean,
                       .exponent = exponent};
    size_t rows = (size_t)s.n_folds * s.n_heads, P = columns_of(&s);
    s.a = need(rows * P * P, sizeof *s.a, "numbers of equations");
    s.b = need(rows * P, sizeof *s.b, "numbers of equations");
    s.n_texts = need(s.n_folds, sizeof *s.n_texts, "folds");
    return s;
}

void learn_systems_free(learn_systems *s)
{
    free(s->a);
    free(s->b);
    free(s->n_texts);
    *s = (learn_systems){0};
}

// The columns of one head's token j.
static void fill_columns(double *x, const learn_systems *s, const learn_text *t, uint32_t head, size_t j)
{
    size_t T = t->shape.n_tokens, F = s->n_features, P = columns_of(s), n_heads = shape_heads(&t->shape);
    size_t L = t->shape.n_layers, layer = head / t->shape.n_kv_heads;
    for (size_t f = 0; f < F; f++) {
        double value = t->z[(f * n_heads + head) * T + j];
        x[2 * f] = value;
        x[2 * f + 1] = value * fabs(value);
        if (s->layer_mean) x[2 * F + f] = t->layer[(f * L + layer) * T + j];
    }
    x[P - 2] = -log((double)(T - j));
    x[P - 1] = 1;
}

// Adds one head of a text, whose weights are brought to a sum of 1.
static void add_head(double *a, double *b, const learn_systems *s, const learn_text *t, const float *importance,
                     uint32_t head)
{
    size_t T = t->shape.n_tokens, P = columns_of(s);
    double x[COLUMNS_MAX], total = 0;
    for (size_t j = t->shape.sink; j < T; j++)
        total += pow(importance[head * T + j] / t->mean_of_all + TARGET_FLOOR, s->exponent);
    for (size_t j = t->shape.sink; j < T; j++) {
        double share = importance[head * T + j] / t->mean_of_all + TARGET_FLOOR;
        double weight = pow(share, s->exponent) / total, y = log(share);
        fill_columns(x, s, t, head, j);
        for (size_t p = 0; p < P; p++) {
            b[p] += weight * x[p] * y;
            for (size_t q = 0; q <= p; q++) a[p * P + q] += weight * x[p] * x[q];
        }
    }
}

void learn_systems_add(learn_systems *s, const learned *l, const learn_text *t, uint32_t fold)
{
    size_t P = columns_of(s);
    const float *importance = l->options.target == TARGET_MAX ? t->top : t->mean;
#pragma omp parallel for schedule(static)
    for (uint32_t h = 0; h < s->n_heads; h++) {
        size_t row = (size_t)fold * s->n_heads + h;
        add_head(s->a + row * P * P, s->b + row * P, s, t, importance, h);
    }
    s->n_texts[fold]++;
}

// The columns of a set's metrics, then recency and the constant.
static size_t list_columns(size_t out[COLUMNS_MAX], const learn_systems *s, uint32_t set)
{
    size_t n = 0;
    for (uint32_t f = 0; f < s->n_features; f++) {
        if (!(set >> f & 1)) continue;
        out[n++] = 2 * f;
        out[n++] = 2 * f + 1;
    }
    for (uint32_t f = 0; s->layer_mean && f < s->n_features; f++)
        if (set >> f & 1) out[n++] = 2 * s->n_features + f;
    out[n++] = columns_of(s) - 2;
    out[n++] = columns_of(s) - 1;
    return n;
}

// One head: sums over folds, lambda on all but the constant, Cholesky. Returns GSL's code.
static int solve_head(const learn_systems *s, const size_t *column, size_t n, double lambda, uint32_t without,
                      uint32_t head, double *weights)
{
    double a[COLUMNS_MAX * COLUMNS_MAX] = {0}, b[COLUMNS_MAX] = {0}, n_texts = 0;
    size_t P = columns_of(s);
    for (uint32_t fold = 0; fold < s->n_folds; fold++) {
        if (fold == without) continue;
        const double *from = s->a + ((size_t)fold * s->n_heads + head) * P * P,
                     *right = s->b + ((size_t)fold * s->n_heads + head) * P;
        n_texts += s->n_texts[fold];
        for (size_t p = 0; p < n; p++) {
            b[p] += right[column[p]];
            for (size_t q = 0; q <= p; q++) a[p * n + q] += from[column[p] * P + column[q]];
        }
    }
    for (size_t p = 0; p + 1 < n; p++) a[p * n + p] += lambda * n_texts;
    for (size_t p = 0; p < n; p++)
        for (size_t q = 0; q < p; q++) a[q * n + p] = a[p * n + q];
    gsl_matrix_view matrix = gsl_matrix_view_array(a, n, n);
    gsl_vector_view given = gsl_vector_view_array(b, n), found = gsl_vector_view_array(weights, n);
    int code = gsl_linalg_cholesky_decomp1(&matrix.matrix);
    return code ? code : gsl_linalg_cholesky_solve(&matrix.matrix, &given.vector, &found.vector);
}

kvb_status learn_systems_solve(const learn_systems *s, uint32_t set, double lambda, uint32_t without, double *weights,
                               kvb_error *err)
{
    size_t column[COLUMNS_MAX], n = list_columns(column, s, set);
    uint32_t failed = UINT32_MAX;
    gsl_error_handler_t *before = gsl_set_error_handler_off();
    for (uint32_t h = 0; h < s->n_heads && failed == UINT32_MAX; h++) {
        int code = solve_head(s, column, n, lambda, without, h, weights + h * n);
        bool finite = code == 0;
        for (size_t p = 0; p < n && finite; p++) finite = isfinite(weights[h * n + p]);
        if (!finite) failed = h;
    }
    gsl_set_error_handler(before);
    if (failed == UINT32_MAX) return KVB_OK;
    return kvb_fail(err, KVB_NUMERIC, "head %u: the equations have no solution with lambda %g; take a larger --lambda",
                    failed, lambda);
}
