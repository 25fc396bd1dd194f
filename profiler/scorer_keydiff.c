// KeyDiff (arXiv 2504.15364, eq. 8; methods.md 3.2): keys that point away from the others are worth keeping.
//
//     anchor_g = mean over j of k_j / ||k_j||        s[g,j] = -cos(k_j, anchor_g)
//
// Ranks exactly as -sum over i of cos(k_j, k_i), at O(T d) instead of O(T^2 d). Other anchors (mean or median of the raw keys) and other
// measures (dot product, Euclidean distance) are the paper's ablations.
#include "profiler/model.h"
#include "profiler/scorer_parts.h"
#include "runtime/fail.h"
#include <gsl/gsl_statistics_float.h>
#include <math.h>
#include <stdlib.h>

typedef enum anchor_kind { ANCHOR_MEAN, ANCHOR_RAW, ANCHOR_MEDIAN } anchor_kind;
typedef enum measure_kind { MEASURE_COS, MEASURE_DOT, MEASURE_EUCLID } measure_kind;

SIMD_CLONES static void mean_anchor(double *anchor, const float *k, uint32_t T, uint32_t d, bool normalised)
{
    for (uint32_t c = 0; c < d; c++) anchor[c] = 0;
    for (uint32_t j = 0; j < T; j++) {
        const float *key = k + (size_t)j * d;
        double inverse = normalised ? 1.0 / fmax(sqrt(dot_double(key, key, d)), 1e-12) : 1.0;
        for (uint32_t c = 0; c < d; c++) anchor[c] += key[c] * inverse;
    }
    for (uint32_t c = 0; c < d; c++) anchor[c] /= T;
}

// column is scratch [T]
static void median_anchor(double *anchor, float *column, const float *k, uint32_t T, uint32_t d)
{
    for (uint32_t c = 0; c < d; c++) {
        for (uint32_t j = 0; j < T; j++) column[j] = k[(size_t)j * d + c];
        anchor[c] = gsl_stats_float_median(column, 1, T);
    }
}

SIMD_CLONES static void measure(float *s, const double *anchor, const float *k, uint32_t T, uint32_t d,
                                measure_kind kind)
{
    double anchor_square = 0;
    for (uint32_t c = 0; c < d; c++) anchor_square += anchor[c] * anchor[c];
    for (uint32_t j = 0; j < T; j++) {
        const float *key = k + (size_t)j * d;
        double along = 0, square = 0;
#pragma omp simd reduction(+ : along, square)
        for (uint32_t c = 0; c < d; c++) {
            double off = kind == MEASURE_EUCLID ? key[c] - anchor[c] : key[c];
            along += key[c] * anchor[c];
            square += off * off;
        }
        s[j] = kind == MEASURE_COS   ? (float)(-along / fmax(sqrt(square * anchor_square), 1e-8))
               : kind == MEASURE_DOT ? (float)-along
                                     : (float)sqrt(square);
    }
}

// The same from the products of the keys with a mean anchor, and their norms, that the device has made.
static kvb_status score_on_device(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, G = view->n_kv_heads, d = view->head_dim;
    bool by_angle = metric_value(m, "similarity") == MEASURE_COS;
    float *anchor = malloc((size_t)G * (d + T) * sizeof *anchor);
    if (!anchor) return kvb_fail(err, KVB_MEMORY, "metric %s: no memory for the norms of %u keys", m->spec, T);
    float *norms = anchor + (size_t)G * d;
    kvb_status status = device_key_mean(view->device, metric_value(m, "anchor") == ANCHOR_MEAN, anchor, err);
    if (status == KVB_OK) status = device_quadratic(view->device, G, anchor, NULL, s, err);
    if (status == KVB_OK && by_angle) status = device_norms(view->device, VIEW_K, norms, err);
    for (uint32_t g = 0; status == KVB_OK && g < G; g++) {
        double length = sqrt(dot_double(anchor + (size_t)g * d, anchor + (size_t)g * d, d));
        for (size_t j = (size_t)g * T; j < (size_t)(g + 1) * T; j++)
            s[j] = (float)(-s[j] / (by_angle ? fmax(norms[j] * length, 1e-8) : 1.0));
    }
    free(anchor);
    return status;
}

// A median has no sum; a distance as the difference of sums would lose its digits.
static unsigned needs_on_device(const metric *m)
{
    return metric_value(m, "anchor") == ANCHOR_MEDIAN || metric_value(m, "similarity") == MEASURE_EUCLID ? VIEW_K : 0;
}

static kvb_status score_keydiff(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, d = view->head_dim;
    anchor_kind kind = (anchor_kind)metric_value(m, "anchor");
    measure_kind by = (measure_kind)metric_value(m, "similarity");
    if (view->device && !needs_on_device(m)) return score_on_device(m, view, s, err);
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t g = 0; g < view->n_kv_heads; g++) {
        const float *k = view->k + (size_t)g * T * d;
        double anchor[MODEL_MAX_HEAD_DIM];
        float *line = s + (size_t)g * T; // scratch until it is written
        if (kind == ANCHOR_MEDIAN) median_anchor(anchor, line, k, T, d);
        else mean_anchor(anchor, k, T, d, kind == ANCHOR_MEAN);
        measure(line, anchor, k, T, d, by);
    }
    return KVB_OK;
}

const scorer scorer_keydiff = {
    .name = "keydiff",
    .variant = "",
    .summary = "distance of a key's direction from the mean direction",
    .source = "KeyDiff, arXiv 2504.15364, eq. 8; as kvpress's KeyDiffPress",
    .formula = "s[g,j] = -cos(k_j, anchor), anchor = mean over i of k_i / ||k_i||\n"
               "similarity=dot: -k_j . anchor; similarity=euclid: ||k_j - anchor||",
    .needs = VIEW_K,
    .needs_on_device = needs_on_device,
    .protect_sink = 4,
    .protect_window = 1,
    .parameters = {{"anchor", 0, 0, 2, true, "of the normalised keys; of the raw keys; median per channel",
                    "mean|raw|median"},
                   {"similarity", 0, 0, 2, true, "what is compared with the anchor", "cos|dot|euclid"}},
    .score = score_keydiff,
};
