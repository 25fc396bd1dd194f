// Expected Attention (methods.md 3.3): the attention that future queries will pay, if they are Gaussian like the past ones.
//
//     mu_h, C_h  = mean and covariance (divisor n) of the queries before RoPE, rows n_s..T-1; stored ones of other texts with stored=1
//     mu', C'    = R mu, R C R^T,  R = mean RoPE rotation over positions T .. T + future - 1
//     z[h,j]     = mu'.k_j / sqrt(d) + k_j^T C' k_j / (2 d)
//     p[h]       = softmax of z over j >= n_s (kvpress) or over all j (LU-KV)
//     s[g,j]     = (mean over h in g of p[h,j] + epsilon) * ||v_j||
//
// kvpress leaves the sinks out and gives them the layer's maximum plus one. Statistics are in double: C' enters an exponent.
#include "profiler/linalg.h"
#include "profiler/scorer_parts.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 512 };

typedef struct ea_settings {
    uint32_t sinks;
    double future, epsilon;
    bool covariance, value_norm, sinks_in_softmax, stored;
} ea_settings;

// Scratch of one head.
typedef struct ea_head {
    double *mean;       // [d]; the block of doubles
    double *covariance; // [d,d]
    double *z;          // [T]
    float *rows;        // [CHUNK, d]; the block of floats
    float *product;     // [max(CHUNK, d), d]
    float *matrix;      // [d,d], C' in float
} ea_head;

static void head_free(ea_head *e)
{
    free(e->mean);
    free(e->rows);
}

static bool head_alloc(ea_head *e, uint32_t T, size_t d)
{
    size_t product = (CHUNK > d ? CHUNK : d) * d;
    e->mean = malloc((d + d * d + T) * sizeof(double));
    e->rows = malloc((CHUNK * d + product + d * d) * sizeof(float));
    if (!e->mean || !e->rows) {
        head_free(e);
        return false;
    }
    e->covariance = e->mean + d;
    e->z = e->covariance + d * d;
    e->product = e->rows + CHUNK * d;
    e->matrix = e->product + product;
    return true;
}

// The loops over rows of d floats; rows of x are ld apart.
SIMD_CLONES static void add_rows(double *sums, const float *x, size_t ld, uint32_t n, size_t d)
{
    for (uint32_t i = 0; i < n; i++)
        for (size_t c = 0; c < d; c++) sums[c] += x[i * ld + c];
}

SIMD_CLONES static void less_mean(float *rows, const float *x, size_t ld, uint32_t n, const double *mean, size_t d)
{
    for (uint32_t i = 0; i < n; i++)
        for (size_t c = 0; c < d; c++) rows[i * d + c] = (float)(x[i * ld + c] - mean[c]);
}

// z [n] = linear mean.x + square along.x; along [n,d], or NULL.
SIMD_CLONES static void logits_of_rows(double *z, const float *x, uint32_t n, const double *mean, const float *along,
                                       size_t d, double linear, double square)
{
    for (uint32_t i = 0; i < n; i++, x += d) {
        double first = 0, second = along ? dot_double(along + i * d, x, (uint32_t)d) : 0;
#pragma omp simd reduction(+ : first)
        for (size_t c = 0; c < d; c++) first += mean[c] * x[c];
        z[i] = first * linear + second * square;
    }
}

// Mean and covariance of the queries from row `from` on.
static void context_statistics(ea_head *e, const layer_view *view, uint32_t h, uint32_t from, bool covariance)
{
    size_t d = view->head_dim, ld = (size_t)view->n_heads * d;
    uint32_t end = view->n_queries;
    const float *q = view->q_raw + h * d;
    memset(e->mean, 0, (d + d * d) * sizeof(double));
    add_rows(e->mean, q + from * ld, ld, end - from, d);
    for (size_t c = 0; c < d; c++) e->mean[c] /= end - from;
    for (uint32_t first = from; covariance && first < end; first += CHUNK) {
        uint32_t n = end - first < CHUNK ? end - first : CHUNK;
        less_mean(e->rows, q + first * ld, ld, n, e->mean, d);
        gemm(true, false, d, d, n, 1.0f, e->rows, d, e->rows, d, 0.0f, e->product, d);
        for (size_t i = 0; i < d * d; i++) e->covariance[i] += (double)e->product[i] / (end - from);
    }
}

// The same as they were stored, from other texts.
static void stored_statistics(ea_head *e, const layer_view *view, uint32_t h)
{
    size_t d = view->head_dim;
    for (size_t c = 0; c < d; c++) e->mean[c] = view->query_mean[h * d + c];
    for (size_t i = 0; i < d * d; i++) e->covariance[i] = view->query_covariance[h * d * d + i];
}

// x = R x for x [d] with a step between its elements; R is 2x2 per pair: [c -s; s c].
static void rotate(double *x, size_t step, const double *cos_sin, uint32_t half)
{
    for (uint32_t p = 0; p < half; p++) {
        double a = x[p * step], b = x[(p + half) * step], c = cos_sin[2 * p], s = cos_sin[2 * p + 1];
        x[p * step] = a * c - b * s;
        x[(p + half) * step] = b * c + a * s;
    }
}

// z[j] for all j of head h.
static void expected_logits(ea_head *e, const layer_view *view, uint32_t h, bool covariance)
{
    size_t d = view->head_dim, T = view->n_tokens;
    const float *k = view->k + (size_t)(h / (view->n_heads / view->n_kv_heads)) * T * d;
    double linear = 1.0 / sqrt((double)d), square = 0.5 / (double)d;
    for (size_t i = 0; covariance && i < d * d; i++) e->matrix[i] = (float)e->covariance[i];
    for (size_t first = 0; first < T; first += CHUNK) {
        size_t n = T - first < CHUNK ? T - first : CHUNK;
        if (covariance) gemm(false, false, n, d, d, 1.0f, k + first * d, d, e->matrix, d, 0.0f, e->product, d);
        logits_of_rows(e->z + first, k + first * d, (uint32_t)n, e->mean, covariance ? e->product : NULL, d, linear,
                       square);
    }
}

static void add_softmax(float *s, const double *z, uint32_t from, uint32_t T, double weight)
{
    double top = -INFINITY, sum = 0;
    for (uint32_t j = from; j < T; j++) top = fmax(top, z[j]);
    for (uint32_t j = from; j < T; j++) sum += exp(z[j] - top);
    for (uint32_t j = from; j < T; j++) s[j] += (float)(exp(z[j] - top) / sum * weight);
}

static void rotate_statistics(double *mean, double *covariance, uint32_t d, const double *cos_sin, uint32_t half)
{
    rotate(mean, 1, cos_sin, half);
    for (uint32_t c = 0; covariance && c < d; c++) rotate(covariance + c, d, cos_sin, half);             // columns: R C
    for (uint32_t r = 0; covariance && r < d; r++) rotate(covariance + (size_t)r * d, 1, cos_sin, half); // (R C) R^T
}

// What a device makes of a layer.
typedef struct ea_sums {
    float *z;      // [H,T]; the block of floats
    float *norms;  // [G,T] of the values
    float *linear; // [H,d]: the means, then what z multiplies the keys by
    float *square; // [H,d,d]
} ea_sums;

// From means and covariances to the weights of z; turned is scratch [d + d * d].
static void turn_on_host(ea_sums *sums, double *turned, const layer_view *view, const double *cos_sin, bool covariance)
{
    size_t d = view->head_dim, n = covariance ? d * d : 0;
    for (size_t h = 0; h < view->n_heads; h++) {
        float *mean = sums->linear + h * d, *matrix = sums->square + h * d * d;
        for (size_t c = 0; c < d; c++) turned[c] = mean[c];
        for (size_t i = 0; i < n; i++) turned[d + i] = matrix[i];
        rotate_statistics(turned, covariance ? turned + d : NULL, (uint32_t)d, cos_sin, view->rope_dim / 2);
        for (size_t c = 0; c < d; c++) mean[c] = (float)(turned[c] / sqrt((double)d));
        for (size_t i = 0; i < n; i++) matrix[i] = (float)(turned[d + i] * 0.5 / (double)d);
    }
}

// To be freed: out->z, also after a failure.
static kvb_status sums_on_device(const metric *m, const layer_view *view, const ea_settings *set, const double *cos_sin,
                                 ea_sums *out, kvb_error *err)
{
    size_t T = view->n_tokens, H = view->n_heads, G = view->n_kv_heads, d = view->head_dim;
    double *turned = malloc((d + d * d) * sizeof *turned);
    out->z = malloc((H * T + G * T + H * d + H * d * d) * sizeof(float));
    if (!out->z || !turned) {
        free(turned);
        return kvb_fail(err, KVB_MEMORY, "metric %s: no memory for statistics of %u keys", m->spec, view->n_tokens);
    }
    out->norms = out->z + H * T;
    out->linear = out->norms + G * T;
    out->square = out->linear + H * d;
    float *square = set->covariance ? out->square : NULL;
    kvb_status status = device_query_moments(view->device, set->sinks, out->linear, square, err);
    if (status == KVB_OK) {
        turn_on_host(out, turned, view, cos_sin, set->covariance);
        status = device_quadratic(view->device, view->n_heads, out->linear, square, out->z, err);
    }
    if (status == KVB_OK && set->value_norm) status = device_norms(view->device, VIEW_V, out->norms, err);
    free(turned);
    return status;
}

// p [T] of query head h, divided by the size of the group.
static void score_head(ea_head *e, float *p, const layer_view *view, uint32_t h, const ea_settings *set,
                       const double *cos_sin, const ea_sums *sums)
{
    uint32_t T = view->n_tokens, d = view->head_dim, half = view->rope_dim / 2, hidden = T - view->n_queries;
    if (sums) {
        for (uint32_t j = 0; j < T; j++) e->z[j] = sums->z[(size_t)h * T + j];
    } else {
        if (set->stored) stored_statistics(e, view, h);
        else context_statistics(e, view, h, set->sinks > hidden ? set->sinks - hidden : 0, set->covariance);
        rotate_statistics(e->mean, set->covariance ? e->covariance : NULL, d, cos_sin, half);
        expected_logits(e, view, h, set->covariance);
    }
    memset(p, 0, T * sizeof *p);
    add_softmax(p, e->z, set->sinks_in_softmax ? 0 : set->sinks, T, (double)view->n_kv_heads / view->n_heads);
}

// s [T] of KV head g from the p [H,T] of all query heads.
static void combine_group(float *s, const float *p, const layer_view *view, uint32_t g, const ea_settings *set,
                          const ea_sums *sums)
{
    uint32_t T = view->n_tokens, d = view->head_dim, group = view->n_heads / view->n_kv_heads;
    memset(s, 0, T * sizeof *s);
    for (uint32_t h = g * group; h < (g + 1) * group; h++)
        for (uint32_t j = 0; j < T; j++) s[j] += p[(size_t)h * T + j];
    for (uint32_t j = set->sinks_in_softmax ? 0 : set->sinks; set->value_norm && j < T; j++) {
        const float *v = sums ? NULL : view->v + ((size_t)g * T + j) * d;
        double norm = sums ? sums->norms[(size_t)g * T + j] : sqrt(dot_double(v, v, d));
        s[j] = (float)((s[j] + set->epsilon) * norm);
    }
}

// Mean cosine and sine per frequency over the positions that follow the context.
static void mean_rotation(double *cos_sin, const layer_view *view, double future)
{
    double next = key_position(view, 0, view->n_tokens - 1) + 1.0;
    for (uint32_t p = 0; p < view->rope_dim / 2; p++) {
        double c = 0, s = 0;
        for (double at = next; at < next + future; at++) {
            c += cos(at * view->rope_frequency[p]);
            s += sin(at * view->rope_frequency[p]);
        }
        cos_sin[2 * p] = c / future;
        cos_sin[2 * p + 1] = s / future;
    }
}

static kvb_status score_ea(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, G = view->n_kv_heads, H = view->n_heads;
    ea_settings set = {(uint32_t)metric_value(m, "sinks"), metric_value(m, "future"),
                       metric_value(m, "epsilon"),         metric_value(m, "covariance") != 0,
                       metric_value(m, "value_norm") != 0, metric_value(m, "sinks_in_softmax") != 0,
                       metric_value(m, "stored") != 0};
    if (set.stored && !view->query_mean)
        return kvb_fail(
            err, KVB_ARGUMENT,
            "metric %s: there are no stored query statistics; make them with `kvbudget statistics` and give "
            "--query-statistics FILE",
            m->spec);
    if (T <= set.sinks)
        return kvb_fail(err, KVB_ARGUMENT,
                        "metric %s: the context has %u tokens, expected more than its %u sinks; use a longer context",
                        m->spec, T, set.sinks);
    double *cos_sin = malloc((size_t)view->rope_dim * sizeof(double) + 1);
    float *p = malloc((size_t)H * T * sizeof *p);
    int failures = !cos_sin || !p;
    ea_sums sums = {NULL, NULL, NULL, NULL};
    kvb_status status = KVB_OK;
    if (!failures) mean_rotation(cos_sin, view, set.future);
    if (!failures && view->device) status = sums_on_device(m, view, &set, cos_sin, &sums, err);
    const ea_sums *made = sums.z ? &sums : NULL;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures)
    for (uint32_t h = status == KVB_OK ? 0 : H; h < H; h++) {
        ea_head e;
        if (!cos_sin || !p || !head_alloc(&e, T, view->head_dim)) {
            failures++;
            continue;
        }
        score_head(&e, p + (size_t)h * T, view, h, &set, cos_sin, made);
        head_free(&e);
    }
    for (uint32_t g = 0; !failures && status == KVB_OK && g < G; g++)
        combine_group(s + (size_t)g * T, p, view, g, &set, made);
    free(cos_sin);
    free(p);
    free(sums.z);
    if (status != KVB_OK) return status;
    if (failures)
        return kvb_fail(err, KVB_MEMORY, "metric %s: no memory for the statistics of %u keys of size %u", m->spec, T,
                        view->head_dim);
    if (set.sinks_in_softmax) return KVB_OK;
    float top = -INFINITY;
    for (uint32_t g = 0; g < G; g++)
        for (uint32_t j = set.sinks; j < T; j++) top = fmaxf(top, s[(size_t)g * T + j]);
    for (uint32_t g = 0; g < G; g++)
        for (uint32_t j = 0; j < set.sinks; j++) s[(size_t)g * T + j] = top + 1;
    return KVB_OK;
}

#define PARAMETERS(sinks_in_softmax)                                                                              \
    {                                                                                                             \
        {"future", 512, 1, 1e6, true, "positions after the context over which RoPE is averaged", NULL},           \
            {"sinks", 4, 0, 4096, true, "first rows left out of the query statistics", NULL},                     \
            {"epsilon", 0.02, 0, 1e6, false, "added to the attention before the value norm multiplies it", NULL}, \
            {"covariance", 1, 0, 1, true, "1 = use the covariance of the queries, 0 = their mean only", NULL},    \
            {"value_norm", 1, 0, 1, true, "1 = multiply by the norm of the value", NULL},                         \
            {"sinks_in_softmax", sinks_in_softmax, 0, 1, true, "1 = the softmax runs over the sinks too", NULL},  \
            {"stored", 0, 0, 1, true, "1 = query statistics of other texts (--query-statistics)", NULL},          \
    }
#define VARIANT(label, text, origin, sinks_in_softmax)                                                        \
    {                                                                                                         \
        .name = "ea", .variant = label, .summary = "expected attention of future queries, " text,             \
        .source = "Expected Attention, arXiv 2510.00636; " origin,                                            \
        .formula = "s[g,j] = (mean over h in g of p[h,j] + epsilon) * ||v_j||,\n"                             \
                   "p = softmax of mu'.k_j / sqrt(d) + k_j C' k_j / 2d, mu' and C' the mean and covariance\n" \
                   "of the queries, turned by the mean rotation of the next `future` positions",              \
        .needs = VIEW_Q_RAW | VIEW_K | VIEW_V, .needs_on_device = need_no_tensors, .protect_sink = 4,         \
        .protect_window = 1, .parameters = PARAMETERS(sinks_in_softmax), .score = score_ea,                   \
    }

const scorer scorer_ea_kvpress = VARIANT("kvpress", "sinks outside the softmax", "as kvpress deploys it", 0);
const scorer scorer_ea_lukv = VARIANT("lukv", "sinks inside the softmax", "as LU-KV published it", 1);
