// KeyDiff (arXiv 2504.15364, eq. 8; methods.md 3.2): keys that point away from the others are worth keeping.
//
//     anchor_g = mean over j of k_j / ||k_j||        s[g,j] = -cos(k_j, anchor_g)
//
// Ranks exactly as -sum over i of cos(k_j, k_i), at O(T d) instead of O(T^2 d).
#include "profiler/model.h"
#include "profiler/scorer.h"
#include <math.h>

static void anchor_of(double *anchor, const float *k, uint32_t T, uint32_t d)
{
    for (uint32_t c = 0; c < d; c++) anchor[c] = 0;
    for (uint32_t j = 0; j < T; j++) {
        const float *key = k + (size_t)j * d;
        double square = 0;
        for (uint32_t c = 0; c < d; c++) square += (double)key[c] * key[c];
        double inverse = 1.0 / fmax(sqrt(square), 1e-12);
        for (uint32_t c = 0; c < d; c++) anchor[c] += key[c] * inverse;
    }
    for (uint32_t c = 0; c < d; c++) anchor[c] /= T;
}

kvb_status score_keydiff(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    (void)m, (void)err;
    uint32_t T = view->n_tokens, d = view->head_dim;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t g = 0; g < view->n_kv_heads; g++) {
        const float *k = view->k + (size_t)g * T * d;
        double anchor[MODEL_MAX_HEAD_DIM], anchor_square = 0;
        anchor_of(anchor, k, T, d);
        for (uint32_t c = 0; c < d; c++) anchor_square += anchor[c] * anchor[c];
        for (uint32_t j = 0; j < T; j++) {
            const float *key = k + (size_t)j * d;
            double along = 0, square = 0;
            for (uint32_t c = 0; c < d; c++) {
                along += key[c] * anchor[c];
                square += (double)key[c] * key[c];
            }
            s[(size_t)g * T + j] = (float)(-along / fmax(sqrt(square * anchor_square), 1e-8));
        }
    }
    return KVB_OK;
}
