// Key norm (arXiv 2406.11430; methods.md 3.7): keys of small norm attract attention.
//
//     s[g,j] = -||k_j||
#include "profiler/scorer_parts.h"
#include <math.h>

static kvb_status score_knorm(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    (void)m;
    uint32_t T = view->n_tokens, d = view->head_dim;
    if (view->device) {
        kvb_status status = device_norms(view->device, VIEW_K, s, err);
        for (uint32_t i = 0; i < view->n_kv_heads * T; i++) s[i] = -s[i];
        return status;
    }
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < view->n_kv_heads * T; i++) {
        const float *key = view->k + (size_t)i * d;
        s[i] = (float)-sqrt(dot_double(key, key, d));
    }
    return KVB_OK;
}

const scorer scorer_knorm = {
    .name = "knorm",
    .variant = "",
    .summary = "small norm of the key",
    .source = "A Simple and Effective L2 Norm-Based Strategy, arXiv 2406.11430; as kvpress's KnormPress",
    .formula = "s[g,j] = -||k_j||",
    .needs = VIEW_K,
    .needs_on_device = need_no_tensors,
    .protect_sink = 4,
    .protect_window = 1,
    .score = score_knorm,
};
