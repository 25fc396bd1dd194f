// Expected Attention (methods.md 3.3): the attention that future queries will pay, if they are Gaussian like the past
// ones.
//
//     mu_h, C_h = mean and covariance (divisor n) of the queries before RoPE, rows n_s .. T - 1
//     mu', C'   = R mu, R C R^T,  R = mean RoPE rotation over positions T .. T + future - 1
//     z[h,j]    = mu'.k_j / sqrt(d) + k_j^T C' k_j / (2 d)
//     p[h]      = softmax of z over j >= n_s (kvpress) or over all j (LU-KV)
//     s[g,j]    = (mean over h in g of p[h,j] + epsilon) * ||v_j||
//
// kvpress leaves the sinks out and gives them the layer's maximum plus one. Statistics are in double: C' enters an
// exponent.
#include "profiler/metric/scorer_parts.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct ea_settings {
    uint32_t future, sinks;
    double epsilon;
    bool covariance, value_norm, sinks_in_softmax;
} ea_settings;

// Sums of all query heads, in one block of doubles that begins at mean.
typedef struct ea_sums {
    double *mean;       // [H,d] of the queries
    double *covariance; // [H,d,d]
    double *z;          // [H,T]
    double *norms;      // [G,T] of the values
    double *cos_sin;    // [rope_dim]
} ea_sums;

static uint64_t sums_bytes(const layer_view *view)
{
    size_t T = view->n_tokens, H = view->n_heads, d = view->head_dim;
    return (H * (d + d * d + T) + view->n_kv_heads * T + view->rope_dim) * sizeof(double);
}

static ea_sums sums_of(const layer_view *view)
{
    size_t T = view->n_tokens, H = view->n_heads, d = view->head_dim;
    ea_sums s = {.mean = need(1, sums_bytes(view), "bytes of query statistics")};
    s.covariance = s.mean + H * d;
    s.z = s.covariance + H * d * d;
    s.norms = s.z + H * T;
    s.cos_sin = s.norms + view->n_kv_heads * T;
    return s;
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

// z [T] becomes weight times its softmax over j >= from, rounded to float; 0 before.
static void softmax_line(double *z, uint32_t from, uint32_t T, double weight)
{
    double top = -INFINITY, sum = 0;
    for (uint32_t j = from; j < T; j++) top = fmax(top, z[j]);
    for (uint32_t j = from; j < T; j++) sum += exp(z[j] - top);
    for (uint32_t j = 0; j < T; j++) z[j] = j < from ? 0 : (float)(exp(z[j] - top) / sum * weight);
}

static void rotate_statistics(double *mean, double *covariance, uint32_t d, const double *cos_sin, uint32_t half)
{
    rotate(mean, 1, cos_sin, half);
    for (uint32_t c = 0; covariance && c < d; c++) rotate(covariance + c, d, cos_sin, half);             // columns: R C
    for (uint32_t r = 0; covariance && r < d; r++) rotate(covariance + (size_t)r * d, 1, cos_sin, half); // (R C) R^T
}

// Replaces z by p [H,T], divided by the size of the group.
static void take_attention(const layer_view *view, const ea_settings *set, ea_sums *sums)
{
    size_t d = view->head_dim, T = view->n_tokens;
    uint32_t H = view->n_heads, group = H / view->n_kv_heads, from = set->sinks_in_softmax ? 0 : set->sinks;
    double scale = view_scale(view), *square = set->covariance ? sums->covariance : NULL;
    const key_form form = {H, sums->mean, square, scale, 0.5 * scale * scale};
#pragma omp parallel for schedule(static)
    for (uint32_t h = 0; h < H; h++)
        rotate_statistics(sums->mean + h * d, square ? square + h * d * d : NULL, (uint32_t)d, sums->cos_sin,
                          view->rope_dim / 2);
    layer_key_forms(view, &form, sums->z);
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t h = 0; h < H; h++) softmax_line(sums->z + h * T, from, (uint32_t)T, 1.0 / group);
}

// s [T] of KV head g
static void combine_group(float *s, const layer_view *view, uint32_t g, const ea_settings *set, const ea_sums *sums)
{
    uint32_t T = view->n_tokens, group = view->n_heads / view->n_kv_heads;
    memset(s, 0, T * sizeof *s);
    for (uint32_t h = g * group; h < (g + 1) * group; h++)
        for (uint32_t j = 0; j < T; j++) s[j] += (float)sums->z[(size_t)h * T + j];
    for (uint32_t j = set->sinks_in_softmax ? 0 : set->sinks; set->value_norm && j < T; j++)
        s[j] = (float)((s[j] + set->epsilon) * sums->norms[(size_t)g * T + j]);
}

// Mean cosine and sine per frequency over the positions that follow the context, as the model multiplies them.
static void mean_rotation(double *cos_sin, const layer_view *view, double future)
{
    double next = key_position(view, 0, view->n_tokens - 1) + 1.0;
    double attention = view->rope_attention != 0 ? view->rope_attention : 1;
    for (uint32_t p = 0; p < view->rope_dim / 2; p++) {
        double c = 0, s = 0;
        for (double at = next; at < next + future; at++) {
            c += cos(at * view->rope_frequency[p]);
            s += sin(at * view->rope_frequency[p]);
        }
        cos_sin[2 * p] = attention * c / future;
        cos_sin[2 * p + 1] = attention * s / future;
    }
}

static uint32_t ea_least_tokens(const metric *m)
{
    const ea_settings *set = metric_settings(m);
    return set->sinks + 1;
}

// kvpress: the sinks get the layer's maximum plus one.
static void lift_sinks(float *s, const layer_view *view, uint32_t sinks)
{
    uint32_t T = view->n_tokens;
    float top = -INFINITY;
    for (uint32_t g = 0; g < view->n_kv_heads; g++)
        for (uint32_t j = sinks; j < T; j++) top = fmaxf(top, s[(size_t)g * T + j]);
    for (uint32_t g = 0; g < view->n_kv_heads; g++)
        for (uint32_t j = 0; j < sinks; j++) s[(size_t)g * T + j] = top + 1;
}

static kvb_status score_ea(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    const ea_settings *set = metric_settings(m);
    ea_sums sums = sums_of(view);
    mean_rotation(sums.cos_sin, view, set->future);
    layer_query_moments(view, set->sinks, sums.mean, set->covariance ? sums.covariance : NULL);
    take_attention(view, set, &sums);
    if (set->value_norm) layer_norms(view, VIEW_V, sums.norms);
    for (uint32_t g = 0; g < view->n_kv_heads; g++) combine_group(s + (size_t)g * view->n_tokens, view, g, set, &sums);
    free(sums.mean);
    if (!set->sinks_in_softmax) lift_sinks(s, view, set->sinks);
    return KVB_OK;
}

static bool ea_press_fits(const metric *m, const char **warning)
{
    const ea_settings *set = metric_settings(m);
    if (set->sinks_in_softmax)
        *warning = "kvpress leaves the sinks out of the softmax: its ranking differs from the one that was calibrated";
    return true;
}

#define PARAMETERS(sinks_in_softmax_)                                                                                \
    {                                                                                                                \
        SPEC(ea_settings, future, 512, 1, 1e6, "positions after the context over which RoPE is averaged"),           \
            SPEC(ea_settings, sinks, 4, 0, 4096, "first rows left out of the query statistics"),                     \
            SPEC(ea_settings, epsilon, 0.02, 0, 1e6, "added to the attention before the value norm multiplies it"),  \
            SPEC_ON_OFF(ea_settings, covariance, 1, "1 = use the covariance of the queries, 0 = their mean only"),   \
            SPEC_ON_OFF(ea_settings, value_norm, 1, "1 = multiply by the norm of the value"),                        \
            SPEC_ON_OFF(ea_settings, sinks_in_softmax, sinks_in_softmax_, "1 = the softmax runs over the sinks too") \
    }
#define VARIANT(usual_, label, text, origin, sinks_in_softmax)                                                      \
    {                                                                                                               \
        .spec = {"ea", label, PARAMETERS(sinks_in_softmax), NULL},                                                  \
        .summary = "expected attention of future queries, " text,                                                   \
        .source = "Expected Attention, arXiv 2510.00636; " origin,                                                  \
        .formula = "s[g,j] = (mean over h in g of p[h,j] + epsilon) * ||v_j||,\n"                                   \
                   "p = softmax of mu'.k_j / sqrt(d) + k_j C' k_j / 2d, mu' and C' the mean and covariance\n"       \
                   "of the queries, turned by the mean rotation of the next `future` positions",                    \
        .needs = VIEW_Q_RAW | VIEW_K | VIEW_V, .protect_sink = 4, .protect_window = 1,                              \
        .least_tokens = ea_least_tokens, .score = score_ea, .bytes = sums_bytes, .press = "ExpectedAttentionPress", \
        .press_arguments = {PRESS_ARGUMENT("n_future_positions", ea_settings, future),                              \
                            PRESS_ARGUMENT("n_sink", ea_settings, sinks),                                           \
                            PRESS_ARGUMENT("use_covariance", ea_settings, covariance),                              \
                            PRESS_ARGUMENT("use_vnorm", ea_settings, value_norm),                                   \
                            PRESS_ARGUMENT("epsilon", ea_settings, epsilon)},                                       \
        .press_fits = ea_press_fits, .usual = usual_,                                                               \
    }

const scorer scorer_ea_kvpress = VARIANT(true, "kvpress", "sinks outside the softmax", "as kvpress deploys it", 0);
const scorer scorer_ea_lukv = VARIANT(false, "lukv", "sinks inside the softmax", "as LU-KV published it", 1);
