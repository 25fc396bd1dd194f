#include "study/learn.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/problem.h"
#include "study/layer_map.h"
#include "study/learned_scores.h"
#include <gsl/gsl_errno.h>
#include <gsl/gsl_linalg.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Texts ----------------------------------------------------------------------------------------------------------

// One text: standardised features and importances.
typedef struct learn_text {
    cache_shape shape;  // with the sinks and the last token protected
    float *z;           // [F, N, T] of every metric of the selection; 0 for sinks
    float *layer;       // [F, L, T] its mean over the layer's heads; NULL without layer_mean
    float *plain;       // [F, N, T] scores as recorded
    float *mean, *top;  // [N, T] importance over the questions: mean, maximum
    double mean_of_all; // mean of `mean` over heads and tokens
} learn_text;

static const cache_shape *check_shape(learn_text *t, const learned *l, size_t k, kvb_error *err, kvb_status *status)
{
    const record_context_info *c = selection_context(l->from, k);
    record_shape model = record_get_shape(l->from->r);
    t->shape = (cache_shape){model.n_layers, model.n_kv_heads, c->n_tokens, l->options.sink, 1};
    *status = cache_shape_check(&t->shape, err);
    return &t->shape;
}

// Allocates room for the longest text of the selection. The caller frees it, also after a failure. Fails with
// KVB_ARGUMENT if a text is protected as a whole.
static kvb_status text_init(learn_text *t, const learned *l, kvb_error *err)
{
    size_t most = 0, G = 1;
    *t = (learn_text){0};
    for (size_t k = 0; k < l->from->n_contexts; k++) {
        kvb_status status;
        const cache_shape *shape = check_shape(t, l, k, err, &status);
        if (status != KVB_OK) return status;
        size_t numbers = (size_t)shape_heads(shape) * shape->n_tokens;
        most = numbers > most ? numbers : most;
        G = shape->n_kv_heads;
    }
    t->z = need(l->from->n_metrics * most, sizeof *t->z, "features");
    t->plain = need(l->from->n_metrics * most, sizeof *t->plain, "scores");
    t->mean = need(most, sizeof *t->mean, "importances");
    t->top = need(most, sizeof *t->top, "importances");
    if (l->options.layer_mean) t->layer = need(l->from->n_metrics * (most / G), sizeof *t->layer, "features");
    return KVB_OK;
}

static size_t numbers_of(const learn_text *t)
{
    return (size_t)shape_heads(&t->shape) * t->shape.n_tokens;
}

static kvb_status read_scores(learn_text *t, const learned *l, size_t k, kvb_error *err)
{
    kvb_status status;
    check_shape(t, l, k, err, &status);
    size_t n = numbers_of(t);
    for (size_t f = 0; f < l->from->n_metrics && status == KVB_OK; f++)
        status = record_read_scores(l->from->r, l->from->contexts[k], l->from->metrics[f], t->plain + f * n, err);
    return status;
}

// Standardises the scores as kvb_rank() does.
static kvb_status standardise(learn_text *t, const learned *l, size_t k, kvb_error *err)
{
    size_t T = t->shape.n_tokens, rows = l->from->n_metrics * shape_heads(&t->shape);
    uint32_t sink = t->shape.sink;
    size_t failed = SIZE_MAX;
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < rows; row++) {
        const float *s = t->plain + row * T;
        float *z = t->z + row * T;
        int logarithm = l->logarithm[row / shape_heads(&t->shape)];
        double mean, scale;
        if (kvb_rank_finite(s, (uint32_t)T) < T) {
#pragma omp critical
            failed = row < failed ? row : failed;
            continue;
        }
        if (l->options.frozen) mean = l->moments[2 * row], scale = l->moments[2 * row + 1];
        else kvb_rank_moments(s, logarithm, sink, (uint32_t)T, &mean, &scale);
        for (size_t j = 0; j < T; j++) z[j] = j < sink ? 0 : (float)((kvb_rank_value(s[j], logarithm) - mean) * scale);
    }
    if (failed == SIZE_MAX) return KVB_OK;
    return kvb_fail(err, KVB_NUMERIC, "%s: context %s: %s has scores that are not finite", l->from->path,
                    selection_context(l->from, k)->id, l->from->metrics[failed / shape_heads(&t->shape)]);
}

static void average_layers(learn_text *t, const learned *l)
{
    size_t T = t->shape.n_tokens, G = t->shape.n_kv_heads, rows = l->from->n_metrics * t->shape.n_layers;
#pragma omp parallel for schedule(static)
    for (size_t row = 0; row < rows; row++) {
        for (size_t j = 0; j < T; j++) {
            double sum = 0;
            for (size_t g = 0; g < G; g++) sum += t->z[(row * G + g) * T + j];
            t->layer[row * T + j] = (float)(sum / (double)G);
        }
    }
}

// Reads the importance and takes its mean and maximum over the questions. `spare` [N, T] is scratch space.
static kvb_status read_importance(learn_text *t, const learned *l, size_t k, float *spare, kvb_error *err)
{
    const record_context_info *c = selection_context(l->from, k);
    size_t n = numbers_of(t);
    uint32_t count = selection_count(l->from, k);
    if (count == 0)
        return kvb_fail(err, KVB_ARGUMENT, "%s: context %s has no question with recorded queries; leave it out",
                        l->from->path, c->id);
    memset(t->mean, 0, n * sizeof *t->mean);
    memset(t->top, 0, n * sizeof *t->top);
    for (uint32_t q = 0; q < c->n_questions; q++) {
        if (!selection_has(l->from, &c->questions[q], q)) continue;
        kvb_status status = record_read_oracle(l->from->r, l->from->contexts[k], q, spare, err);
        if (status != KVB_OK) return status;
        for (size_t i = 0; i < n; i++) {
            t->mean[i] += spare[i] / (float)count;
            t->top[i] = spare[i] > t->top[i] ? spare[i] : t->top[i];
        }
    }
    t->mean_of_all = 0;
    for (size_t i = 0; i < n; i++) t->mean_of_all += t->mean[i];
    t->mean_of_all /= (double)n;
    if (t->mean_of_all > 0) return KVB_OK;
    return kvb_fail(err, KVB_NUMERIC, "%s: context %s: no token has any importance", l->from->path, c->id);
}

static kvb_status text_read(learn_text *t, const learned *l, size_t k, kvb_error *err)
{
    kvb_status status = read_scores(t, l, k, err);
    if (status == KVB_OK) status = read_importance(t, l, k, t->z, err); // z is not in use yet
    if (status == KVB_OK) status = standardise(t, l, k, err);
    if (status == KVB_OK && t->layer) average_layers(t, l);
    return status;
}

// Finds the metrics whose scores are never negative in any text: their logarithm is the feature.
static kvb_status find_signs(learned *l, learn_text *t, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t f = 0; f < l->from->n_metrics; f++) l->logarithm[f] = 1;
    for (size_t k = 0; k < l->from->n_contexts && status == KVB_OK; k++) {
        status = read_scores(t, l, k, err);
        size_t n = numbers_of(t);
        for (size_t i = 0; i < l->from->n_metrics * n && status == KVB_OK; i++)
            if (t->plain[i] < 0) l->logarithm[i / n] = 0;
    }
    return status;
}

// Takes the mean and 1 / deviation of every row of scores [T] over all texts, which count alike, however long they are.
static kvb_status gather_moments(learned *l, learn_text *t, kvb_error *err)
{
    size_t rows = l->from->n_metrics * shape_heads(&t->shape);
    kvb_status status = KVB_OK;
    l->moments = need(2 * rows, sizeof *l->moments, "means and deviations");
    double *sum = need(2 * rows, sizeof *sum, "means and deviations"); // of means; of variances and squares of means
    for (size_t k = 0; k < l->from->n_contexts && status == KVB_OK; k++) {
        status = read_scores(t, l, k, err);
        for (size_t row = 0; row < rows && status == KVB_OK; row++) {
            double mean, scale;
            uint32_t T = t->shape.n_tokens;
            kvb_rank_moments(t->plain + row * T, l->logarithm[row / shape_heads(&t->shape)], t->shape.sink, T, &mean,
                             &scale); // if a score is not finite, standardise() says so
            sum[2 * row] += mean;
            sum[2 * row + 1] += mean * mean + (scale > 0 ? 1 / (scale * scale) : 0);
        }
    }
    for (size_t row = 0; row < rows; row++) {
        double n = (double)l->from->n_contexts, mean = sum[2 * row] / n, square = sum[2 * row + 1] / n;
        double variance = square - mean * mean;
        if (!(variance > 1e-12 * square)) continue; // says nothing: 0 and 0, as in kvb_rank_moments()
        l->moments[2 * row] = mean;
        l->moments[2 * row + 1] = 1 / sqrt(variance);
    }
    free(sum);
    return status;
}

// ---- Normal equations -----------------------------------------------------------------------------------------------

// The equations are gathered once, per fold. If a fold is left out, the sums of the others are used. So a trial reads
// the tokens only to rank them, not to fit.

// Normal equations A w = b of every fold and head, with columns P = 2 F + 2, or 3 F + 2 with layer_mean, in the
// order that weights have (runtime/kvbudget.h).
typedef struct learn_systems {
    uint32_t n_folds, n_heads, n_features;
    bool layer_mean;
    uint32_t by_keys; // the features whose extremes are kept: KeyDiff
    double exponent;
    double *a, *b;     // [folds, N, P, P], [folds, N, P]
    uint32_t *n_texts; // [folds]
} learn_systems;

enum { COLUMNS_MAX = 3 * KVB_RANK_FEATURES_MAX + 2 };

static const double TARGET_FLOOR = 1e-3; // of the mean importance: added to every token's
static const double EXTREME = 0.05;      // added to KeyDiff's weight of z |z|

static uint32_t column_count(uint32_t n_features, bool layer_mean)
{
    return (layer_mean ? 3 : 2) * n_features + 2;
}

static size_t columns_of(const learn_systems *s)
{
    return column_count(s->n_features, s->layer_mean);
}

static learn_systems make_systems(const learned *l, double exponent)
{
    record_shape model = record_get_shape(l->from->r);
    learn_systems s = {.n_folds = l->n_folds,
                       .n_heads = model.n_layers * model.n_kv_heads,
                       .n_features = (uint32_t)l->from->n_metrics,
                       .layer_mean = l->options.layer_mean,
                       .exponent = exponent};
    size_t rows = (size_t)s.n_folds * s.n_heads, P = columns_of(&s);
    for (uint32_t f = 0; f < s.n_features; f++)
        if (strncmp(l->from->metrics[f], "keydiff", 7) == 0) s.by_keys |= 1u << f;
    s.a = need(rows * P * P, sizeof *s.a, "numbers of equations");
    s.b = need(rows * P, sizeof *s.b, "numbers of equations");
    s.n_texts = need(s.n_folds, sizeof *s.n_texts, "folds");
    return s;
}

// Fills the columns of one head's token j.
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

// Adds one head of a text. The weights of its tokens are scaled to a sum of 1.
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

static void add_to_systems(learn_systems *s, const learned *l, const learn_text *t, uint32_t fold)
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

// Solves one head: sums over folds, adds lambda for all but the constant, Cholesky. A weight of z |z| with the other
// sign than that of z describes where most tokens lie, but turns back beyond: the tokens that stand out most would rank
// low, and in other texts there are more of these. So it counts in the fit and is not kept. And a token whose key is
// unlike all others (a needle) must not be outvoted: at z = 5, EXTREME is worth a factor of 3.5 of importance. Returns
// GSL's code.
static int solve_head(const learn_systems *s, double lambda, uint32_t without, uint32_t head, double *weights)
{
    double a[COLUMNS_MAX * COLUMNS_MAX] = {0}, b[COLUMNS_MAX] = {0}, n_texts = 0;
    size_t P = columns_of(s);
    for (uint32_t fold = 0; fold < s->n_folds; fold++) {
        if (fold == without) continue;
        const double *from = s->a + ((size_t)fold * s->n_heads + head) * P * P,
                     *right = s->b + ((size_t)fold * s->n_heads + head) * P;
        n_texts += s->n_texts[fold];
        for (size_t p = 0; p < P; p++) {
            b[p] += right[p];
            for (size_t q = 0; q <= p; q++) a[p * P + q] += from[p * P + q];
        }
    }
    for (size_t p = 0; p + 1 < P; p++) a[p * P + p] += lambda * n_texts;
    for (size_t p = 0; p < P; p++)
        for (size_t q = 0; q < p; q++) a[q * P + p] = a[p * P + q];
    gsl_matrix_view matrix = gsl_matrix_view_array(a, P, P);
    gsl_vector_view given = gsl_vector_view_array(b, P), found = gsl_vector_view_array(weights, P);
    int code = gsl_linalg_cholesky_decomp1(&matrix.matrix);
    if (!code) code = gsl_linalg_cholesky_solve(&matrix.matrix, &given.vector, &found.vector);
    for (size_t f = 0; f < s->n_features && !code; f++) {
        if (weights[2 * f] * weights[2 * f + 1] < 0) weights[2 * f + 1] = 0;
        if (s->by_keys >> f & 1) weights[2 * f + 1] += EXTREME;
    }
    return code;
}

// Solves for weights [N, P] from all folds but `without` (UINT32_MAX: from all).
static kvb_status solve_systems(const learn_systems *s, double lambda, uint32_t without, double *weights,
                                kvb_error *err)
{
    size_t P = columns_of(s);
    uint32_t failed = UINT32_MAX;
    gsl_error_handler_t *before = gsl_set_error_handler_off();
    for (uint32_t h = 0; h < s->n_heads && failed == UINT32_MAX; h++) {
        int code = solve_head(s, lambda, without, h, weights + h * P);
        bool finite = code == 0;
        for (size_t p = 0; p < P && finite; p++) finite = isfinite(weights[h * P + p]);
        if (!finite) failed = h;
    }
    gsl_set_error_handler(before);
    if (failed == UINT32_MAX) return KVB_OK;
    return kvb_fail(err, KVB_NUMERIC, "head %u: the equations have no solution with lambda %g; take a larger --lambda",
                    failed, lambda);
}

// ---- What a ranking loses on a text that it was not fitted on, under the budgets that are best for that text --------

const double LEARN_RATIO[LEARN_RATIOS] = {0.5, 0.8, 0.9};

// Computes scores [N, T] by the linear form of kvb_rank_layer(), from features that are standardised already.
static void rank_text(float *scores, const learn_text *t, const learn_systems *s, const double *weights)
{
    size_t T = t->shape.n_tokens, heads = shape_heads(&t->shape), L = t->shape.n_layers;
    size_t F = s->n_features, P = columns_of(s);
#pragma omp parallel for schedule(static)
    for (size_t h = 0; h < heads; h++) {
        const double *w = weights + h * P;
        size_t layer = h / t->shape.n_kv_heads;
        for (size_t j = 0; j < T; j++) {
            double sum = w[P - 1] - w[P - 2] * log((double)(T - j));
            for (size_t f = 0; f < F; f++) {
                double z = t->z[(f * heads + h) * T + j];
                sum += z * (w[2 * f] + w[2 * f + 1] * fabs(z));
                if (s->layer_mean) sum += w[2 * F + f] * t->layer[(f * L + layer) * T + j];
            }
            scores[h * T + j] = (float)sum;
        }
    }
}

static kvb_status add_losses(learn_trial *trial, const learn_text *t, const float *scores, kvb_error *err)
{
    const solve_options options = {HULL_FEASIBLE, SCOPE_GLOBAL, LEARN_RATIO, LEARN_RATIOS, NULL};
    metric_order order;
    problem p;
    kvb_status status = metric_order_make(&order, &t->shape, scores, err);
    problem_init(&p, &t->shape, &options);
    if (status == KVB_OK) status = loss_curves_fill(&p.curves, &order, t->mean, err);
    if (status == KVB_OK) status = problem_solve(&p, err);
    for (int i = 0; i < LEARN_RATIOS && status == KVB_OK; i++) trial->loss[i] += p.loss[i];
    problem_free(&p);
    metric_order_free(&order);
    return status;
}

// Adds to trial->loss what text t, of fold `fold`, loses by a fit without that fold.
static kvb_status try_fit(learn_trial *trial, const learn_systems *s, const learn_text *t, uint32_t fold,
                          kvb_error *err)
{
    float *scores = need(numbers_of(t), sizeof *scores, "scores");
    double *weights = need(s->n_heads * columns_of(s), sizeof *weights, "weights");
    kvb_status status = solve_systems(s, trial->lambda, fold, weights, err);
    if (status == KVB_OK) {
        rank_text(scores, t, s, weights);
        status = add_losses(trial, t, scores, err);
    }
    free_all(scores, weights);
    return status;
}

// ---- The fit --------------------------------------------------------------------------------------------------------

static const double EXPONENTS[] = {0, 0.25, 0.5};
static const double LAMBDAS[] = {1e-4, 1e-3, 1e-2, 1e-1};
enum { N_EXPONENTS = sizeof EXPONENTS / sizeof *EXPONENTS, N_LAMBDAS = sizeof LAMBDAS / sizeof *LAMBDAS };
_Static_assert(LEARN_TRIALS_MAX == KVB_RANK_FEATURES_MAX + N_EXPONENTS * N_LAMBDAS, "room for all trials");

// Everything that a fit works with.
typedef struct ranking_fit {
    learned *l;
    learn_text text;
    learn_systems systems[N_EXPONENTS];
    uint32_t n_systems;
    study_progress *progress;
} ranking_fit;

// ---- Trials ---------------------------------------------------------------------------------------------------------

static const learn_systems *systems_of(const ranking_fit *f, double exponent)
{
    for (uint32_t i = 0; i < f->n_systems; i++)
        if (f->systems[i].exponent == exponent) return &f->systems[i];
    return &f->systems[0];
}

// Runs the trials text by text: each text is read once for all of them.
static kvb_status run_trials(ranking_fit *f, kvb_error *err)
{
    learned *l = f->l;
    kvb_status status = KVB_OK;
    for (size_t k = 0; k < l->from->n_contexts && status == KVB_OK; k++) {
        status = text_read(&f->text, l, k, err);
        for (uint32_t i = 0; i < l->n_trials && status == KVB_OK; i++) {
            learn_trial *t = &l->trials[i];
            if (i < l->from->n_metrics) status = add_losses(t, &f->text, f->text.plain + i * numbers_of(&f->text), err);
            else status = try_fit(t, systems_of(f, t->exponent), &f->text, l->fold[k], err);
            if (status == KVB_OK && !study_progress_step(f->progress))
                return kvb_fail(err, KVB_INTERRUPTED, "stopped; nothing was written");
        }
    }
    for (uint32_t i = 0; i < l->n_trials; i++) {
        learn_trial *t = &l->trials[i];
        double product = 1;
        for (int r = 0; r < LEARN_RATIOS; r++) product *= t->loss[r] /= (double)l->from->n_contexts;
        t->score = cbrt(product);
    }
    return status;
}

// ---- Steps ----------------------------------------------------------------------------------------------------------

static kvb_status gather_equations(ranking_fit *f, kvb_error *err)
{
    learned *l = f->l;
    double own = l->options.exponent;
    kvb_status status = KVB_OK;
    for (; f->n_systems < (isnan(own) ? N_EXPONENTS : 1); f->n_systems++)
        f->systems[f->n_systems] = make_systems(l, isnan(own) ? EXPONENTS[f->n_systems] : own);
    for (size_t k = 0; k < l->from->n_contexts && status == KVB_OK; k++) {
        status = text_read(&f->text, l, k, err);
        for (uint32_t i = 0; i < f->n_systems && status == KVB_OK; i++)
            add_to_systems(&f->systems[i], l, &f->text, l->fold[k]);
        if (status == KVB_OK && !study_progress_step(f->progress))
            return kvb_fail(err, KVB_INTERRUPTED, "stopped; nothing was written");
    }
    return status;
}

// Chooses lambda and exponent, unless they are given. Every metric's own order is tried too, for comparison.
static kvb_status search_settings(ranking_fit *f, kvb_error *err)
{
    learned *l = f->l;
    double own = l->options.lambda;
    l->n_trials = l->chosen = (uint32_t)l->from->n_metrics;
    for (uint32_t e = 0; e < f->n_systems; e++)
        for (int i = 0; i < (isnan(own) ? N_LAMBDAS : 1); i++)
            l->trials[l->n_trials++] =
                (learn_trial){.lambda = isnan(own) ? LAMBDAS[i] : own, .exponent = f->systems[e].exponent};
    kvb_status status = run_trials(f, err);
    for (uint32_t i = l->chosen; i < l->n_trials; i++)
        if (l->trials[i].score < l->trials[l->chosen].score) l->chosen = i;
    return status;
}

// Number of columns of a head in the file.
static uint32_t written_columns(const learned *l)
{
    uint32_t F = (uint32_t)l->from->n_metrics;
    return column_count(F, l->options.layer_mean) + (l->options.frozen ? 2 * F : 0);
}

// Copies a fold's weights [N, fitted columns] to l->weights, with frozen moments before the last two columns.
static void keep_weights(learned *l, const double *found, size_t n_heads, uint32_t fold)
{
    size_t F = l->from->n_metrics, P = written_columns(l), n = column_count((uint32_t)F, l->options.layer_mean);
    for (size_t h = 0; h < n_heads; h++) {
        double *to = l->weights + (fold * n_heads + h) * P;
        memcpy(to, found + h * n, (n - 2) * sizeof *to);
        for (size_t f = 0; f < F && l->options.frozen; f++)
            memcpy(to + n - 2 + 2 * f, l->moments + 2 * (f * n_heads + h), 2 * sizeof *to);
        memcpy(to + P - 2, found + h * n + n - 2, 2 * sizeof *to);
    }
}

// Fits the weights to all texts, then to all texts but those of each fold.
static kvb_status fit_weights(ranking_fit *f, kvb_error *err)
{
    learned *l = f->l;
    const learn_trial *t = &l->trials[l->chosen];
    const learn_systems *s = systems_of(f, t->exponent);
    kvb_status status = KVB_OK;
    double *found = need(s->n_heads * columns_of(s), sizeof *found, "weights");
    l->weights = need((1 + l->n_folds) * (size_t)s->n_heads * written_columns(l), sizeof *l->weights, "weights");
    for (uint32_t fold = 0; fold <= l->n_folds && status == KVB_OK; fold++) {
        status = solve_systems(s, t->lambda, fold ? fold - 1 : UINT32_MAX, found, err);
        if (status == KVB_OK) keep_weights(l, found, s->n_heads, fold);
    }
    free(found);
    l->options.lambda = t->lambda;
    l->options.exponent = t->exponent;
    return status;
}

static kvb_status check_request(const learned *l, kvb_error *err)
{
    if (l->from->n_metrics > KVB_RANK_FEATURES_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "%zu metrics: a ranking takes at most %d; name fewer with --feature",
                        l->from->n_metrics, KVB_RANK_FEATURES_MAX);
    for (size_t i = 0; i < l->from->n_metrics; i++)
        if (strncmp(l->from->metrics[i], "learned:", 8) == 0)
            return kvb_fail(err, KVB_ARGUMENT,
                            "%s: a ranking cannot be a feature of another; name the metrics with --feature",
                            l->from->metrics[i]);
    return KVB_OK;
}

// Deals the texts into folds. Contexts of the same tokens, with other questions, are one text and left out together.
static kvb_status deal_folds(learned *l, kvb_error *err)
{
    size_t n = l->from->n_contexts;
    uint32_t n_texts = 0;
    kvb_status status = KVB_OK;
    l->contexts = need(n, sizeof *l->contexts, "contexts");
    l->fold = need(n, sizeof *l->fold, "contexts");
    for (size_t k = 0; k < n && status == KVB_OK; k++) {
        size_t same = 0;
        status = context_sha256(l->from, k, l->contexts[k], err);
        while (strcmp(l->contexts[same], l->contexts[k]) != 0) same++;
        l->fold[k] = same < k ? l->fold[same] : n_texts++ % LEARN_FOLDS_MAX;
    }
    l->n_folds = n_texts < LEARN_FOLDS_MAX ? n_texts : LEARN_FOLDS_MAX;
    if (status != KVB_OK || n_texts > 1) return status;
    return kvb_fail(err, KVB_ARGUMENT,
                    "%s: one text is selected; a ranking is judged on texts left out, so at least two are needed",
                    l->from->path);
}

static double count_steps(const learned *l)
{
    double settings = (isnan(l->options.lambda) ? N_LAMBDAS : 1) * (isnan(l->options.exponent) ? N_EXPONENTS : 1);
    return (double)l->from->n_contexts * (1 + (double)l->from->n_metrics + settings);
}

kvb_status learn_fit(learned *out, const selection *from, const learn_options *o, study_progress *progress,
                     kvb_error *err)
{
    *out = (learned){.from = from, .options = *o};
    out->options.layer_mean = o->layer_mean && record_get_shape(from->r).n_kv_heads > 1;
    ranking_fit f = {.l = out, .progress = progress};
    kvb_status status = check_request(out, err);
    if (status != KVB_OK) return status;
    study_progress_begin(progress, count_steps(out));
    status = deal_folds(out, err);
    if (status == KVB_OK) status = text_init(&f.text, out, err);
    if (status == KVB_OK) status = find_signs(out, &f.text, err);
    if (status == KVB_OK && o->frozen) status = gather_moments(out, &f.text, err);
    if (status == KVB_OK) status = gather_equations(&f, err);
    if (status == KVB_OK) status = search_settings(&f, err);
    if (status == KVB_OK) status = fit_weights(&f, err);
    for (uint32_t i = 0; i < f.n_systems; i++) free_all(f.systems[i].a, f.systems[i].b, f.systems[i].n_texts);
    free_all(f.text.z, f.text.layer, f.text.plain, f.text.mean, f.text.top);
    return status;
}

void learn_free(learned *l)
{
    free_all(l->weights, l->moments, l->contexts, l->fold);
    l->weights = l->moments = NULL;
    l->contexts = NULL;
    l->fold = NULL;
}

// ---- A ranking's description, and its file --------------------------------------------------------------------------

static void add_features(cJSON *about, const learned *l)
{
    cJSON *list = cJSON_AddArrayToObject(about, "features");
    for (size_t f = 0; f < l->from->n_metrics; f++) {
        cJSON *one = cJSON_CreateObject();
        cJSON_AddItemToArray(list, one);
        json_put(one, "metric %s log %d", l->from->metrics[f], l->logarithm[f]);
    }
}

// Tells whether no earlier context has the same tokens under another name.
static bool first_of_text(const learned *l, size_t k)
{
    size_t first = 0;
    while (strcmp(l->contexts[first], l->contexts[k]) != 0) first++;
    return first == k;
}

// Adds which texts each fold leaves out; a text is named once, however often it was recorded.
static void add_folds(cJSON *about, const learned *l)
{
    cJSON *list = cJSON_AddArrayToObject(about, "folds");
    for (uint32_t fold = 0; fold < l->n_folds; fold++) {
        cJSON *one = cJSON_CreateArray();
        cJSON_AddItemToArray(list, one);
        for (size_t k = 0; k < l->from->n_contexts; k++)
            if (l->fold[k] == fold && first_of_text(l, k))
                cJSON_AddItemToArray(one, cJSON_CreateString(l->contexts[k]));
    }
}

static void add_fit(cJSON *about, const learned *l)
{
    const learn_trial *t = &l->trials[l->chosen];
    cJSON *losses = cJSON_AddObjectToObject(about, "held_out_loss");
    json_put(about, "sink %u layer_mean %d frozen %d target %s lambda %g exponent %g", l->options.sink,
             l->options.layer_mean, l->options.frozen, l->options.target == TARGET_MAX ? "max" : "mean", t->lambda,
             t->exponent);
    for (int r = 0; r < LEARN_RATIOS; r++) {
        char key[16];
        snprintf(key, sizeof key, "%g", LEARN_RATIO[r]);
        cJSON_AddNumberToObject(losses, key, t->loss[r]);
    }
}

static void add_origin(cJSON *m, const learned *l, const char *record_sha256)
{
    static const char *const copied[] = {"architecture", "model_id", "model_sha256", "tokenizer_sha256",
                                         "calibration_sha256"};
    json_put(m, "tool_version %s record_sha256 %s", KVBUDGET_VERSION, record_sha256);
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++)
        cJSON_AddStringToObject(m, copied[i], record_text(l->from->r, copied[i]));
}

static kvb_status write_named(const char *path, rank_content *content, cJSON *about, const cJSON *origin, char name[24],
                              kvb_error *err)
{
    char *text = cJSON_PrintUnformatted(about);
    content->about = text;
    char *named = rank_name(name, content);
    content->about = named;
    kvb_status status = rank_write(path, content, origin, err);
    cJSON_free(text);
    free(named);
    return status;
}

// Writes weights for all layers of the model: 0 for those that the record leaves out, since nothing is ranked there.
static kvb_status write_spread(const learned *l, const char *path, cJSON *about, const cJSON *origin, char name[24],
                               kvb_error *err)
{
    layer_map layers;
    double *weights = NULL;
    uint32_t heads = record_get_shape(l->from->r).n_kv_heads, columns = written_columns(l);
    kvb_status status = layer_map_read(&layers, l->from->r, err);
    if (status == KVB_OK) weights = layer_map_spread(&layers, l->weights, 1 + l->n_folds, (size_t)heads * columns);
    rank_content content = {l->n_folds, layers.n_layers, heads, columns, weights, NULL};
    if (status == KVB_OK) status = write_named(path, &content, about, origin, name, err);
    free(weights);
    layer_map_free(&layers);
    return status;
}

kvb_status learn_write(const learned *l, const char *path, char name[24], kvb_error *err)
{
    char sha256[65];
    cJSON *about = cJSON_CreateObject(), *origin = cJSON_CreateObject();
    kvb_status status = record_file_sha256(l->from->r, sha256, err);
    if (status == KVB_OK) {
        add_features(about, l);
        add_folds(about, l);
        add_fit(about, l);
        add_origin(origin, l, sha256);
        status = write_spread(l, path, about, origin, name, err);
    }
    cJSON_Delete(about);
    cJSON_Delete(origin);
    return status;
}
