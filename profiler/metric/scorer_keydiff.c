// KeyDiff (arXiv 2504.15364, eq. 8; methods.md 3.2): keys that point away from the others are worth keeping.
//
//     anchor_g = mean over j of k_j / ||k_j||        s[g,j] = -cos(k_j, anchor_g)
//
// Ranks exactly as -sum over i of cos(k_j, k_i), at O(T d) instead of O(T^2 d). Other anchors (mean or median of the
// raw keys) and other measures (dot product, Euclidean distance) are the paper's ablations.
#include "profiler/metric/scorer_parts.h"
#include <gsl/gsl_statistics_float.h>
#include <math.h>
#include <stdlib.h>

typedef enum key_anchor { ANCHOR_MEAN, ANCHOR_RAW, ANCHOR_MEDIAN } key_anchor;
typedef enum key_similarity { SIMILARITY_COS, SIMILARITY_DOT, SIMILARITY_EUCLID } key_similarity;

typedef struct keydiff_settings {
    key_anchor anchor;
    key_similarity similarity;
} keydiff_settings;

// anchor [G,d]; column is scratch [T]
static void median_anchors(double *anchor, float *column, const layer_view *view)
{
    size_t T = view->n_tokens, d = view->head_dim;
    for (size_t g = 0; g < view->n_kv_heads; g++)
        for (size_t c = 0; c < d; c++) {
            for (size_t j = 0; j < T; j++) column[j] = view->k[(g * T + j) * d + c];
            anchor[g * d + c] = gsl_stats_float_median(column, 1, T);
        }
}

// s[j] = ||k_j - anchor||
SIMD_CLONES static void distances(float *s, const double *anchor, const float *k, uint32_t T, uint32_t d)
{
    for (uint32_t j = 0; j < T; j++, k += d) {
        double square = 0;
#pragma omp simd reduction(+ : square)
        for (uint32_t c = 0; c < d; c++) square += (k[c] - anchor[c]) * (k[c] - anchor[c]);
        s[j] = (float)sqrt(square);
    }
}

// anchor [G,d]; along and norms are scratch [G,T]
static void compare(const metric *m, const layer_view *view, const double *anchor, double *along, double *norms,
                    float *s)
{
    uint32_t T = view->n_tokens, G = view->n_kv_heads, d = view->head_dim;
    const keydiff_settings *set = metric_settings(m);
    key_similarity by = set->similarity;
    const key_form form = {.n_heads = G, .linear = anchor, .a = 1};
    if (by == SIMILARITY_EUCLID) {
        for (size_t g = 0; g < G; g++) distances(s + g * T, anchor + g * d, view->k + g * T * d, T, d);
        return;
    }
    layer_key_forms(view, &form, along);
    if (by == SIMILARITY_COS) layer_norms(view, VIEW_K, norms);
    for (size_t g = 0; g < G; g++) {
        double square = 0;
        for (uint32_t c = 0; c < d; c++) square += anchor[g * d + c] * anchor[g * d + c];
        double length = sqrt(square);
        for (size_t j = g * T; j < (g + 1) * T; j++)
            s[j] = (float)(-along[j] / (by == SIMILARITY_COS ? fmax(norms[j] * length, 1e-8) : 1.0));
    }
}

static kvb_status score_keydiff(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    size_t n = (size_t)view->n_kv_heads * view->n_tokens;
    const keydiff_settings *set = metric_settings(m);
    double *along = need(2 * n + (size_t)view->n_kv_heads * view->head_dim, sizeof *along, "products with keys");
    double *norms = along + n, *anchor = norms + n;
    if (set->anchor == ANCHOR_MEDIAN) median_anchors(anchor, s, view);
    else layer_key_means(view, set->anchor == ANCHOR_MEAN, anchor);
    compare(m, view, anchor, along, norms, s);
    free(along);
    return KVB_OK;
}

static bool keydiff_press_fits(const metric *m, const char **warning)
{
    const keydiff_settings *set = metric_settings(m);
    if (set->anchor != ANCHOR_MEAN || set->similarity != SIMILARITY_COS)
        *warning = "kvpress's KeyDiff has the mean anchor and the cosine: its ranking differs from the one that was "
                   "calibrated";
    return true;
}

const scorer scorer_keydiff = {
    .spec = {.name = "keydiff",
             .parameters = {SPEC_CHOICE(keydiff_settings, anchor, ANCHOR_MEAN, 2, "mean|raw|median",
                                        "of the normalised keys; of the raw keys; median per channel"),
                            SPEC_CHOICE(keydiff_settings, similarity, SIMILARITY_COS, 2, "cos|dot|euclid",
                                        "what is compared with the anchor")}},
    .summary = "distance of a key's direction from the mean direction",
    .source = "KeyDiff, arXiv 2504.15364, eq. 8; as kvpress's KeyDiffPress",
    .formula = "s[g,j] = -cos(k_j, anchor), anchor = mean over i of k_i / ||k_i||\n"
               "similarity=dot: -k_j . anchor; similarity=euclid: ||k_j - anchor||",
    .needs = VIEW_K,
    .protect_sink = 4,
    .protect_window = 1,
    .usual = true,
    .score = score_keydiff,
    .press = "KeyDiffPress",
    .press_fits = keydiff_press_fits,
};
