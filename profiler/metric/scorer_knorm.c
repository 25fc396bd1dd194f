// Key norm (arXiv 2406.11430; methods.md 3.7): keys of small norm attract attention.
//
//     s[g,j] = -||k_j||
#include "profiler/metric/scorer_parts.h"
#include <stdlib.h>

static kvb_status score_knorm(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    size_t n = (size_t)view->n_kv_heads * view->n_tokens;
    double *norms = need(n, sizeof *norms, "norms of keys");
    layer_norms(view, VIEW_K, norms);
    for (size_t i = 0; i < n; i++) s[i] = (float)-norms[i];
    free(norms);
    return KVB_OK;
}

const scorer scorer_knorm = {
    .spec = {.name = "knorm"},
    .summary = "small norm of the key",
    .source = "A Simple and Effective L2 Norm-Based Strategy, arXiv 2406.11430; as kvpress's KnormPress",
    .formula = "s[g,j] = -||k_j||",
    .needs = VIEW_K,
    .protect_sink = 4,
    .protect_window = 1,
    .score = score_knorm,
    .press = "KnormPress",
};
