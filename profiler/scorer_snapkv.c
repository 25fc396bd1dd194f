// SnapKV (arXiv 2404.14469; methods.md 3.1): what the last W context queries attend to.
//
//     a[h,w,j] = softmax over visible keys of q_w k_j / sqrt(d)        row w of the window sees j <= T - W + w
//     u[h,j]   = mean over w of a[h,w,j], for j < T - W
//     s[g,j]   = mean over h in group g of pool(u[h], kernel)[j]
//
// The window's own positions get the layer's maximum (LU-KV) or that plus one (kvpress); both protect them anyway.
#include "profiler/linalg.h"
#include "profiler/scorer.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// u[j] = mean attention of the window's queries of head h, j < T - W. attention is scratch [W, T].
SIMD_CLONES static void window_attention(float *u, float *attention, const layer_view *view, uint32_t h,
                                         uint32_t window)
{
    uint32_t T = view->n_tokens, d = view->head_dim, H = view->n_heads, old = T - window;
    const float *k = view->k + (size_t)(h / (H / view->n_kv_heads)) * T * d;
    gemm(false, true, window, T, d, 1.0f / sqrtf((float)d), view->q + ((size_t)old * H + h) * d, (size_t)H * d, k, d,
         0.0f, attention, T);
    memset(u, 0, old * sizeof(float));
    for (uint32_t w = 0; w < window; w++) {
        float *line = attention + (size_t)w * T, top = line[0];
        uint32_t seen = old + w + 1;
        for (uint32_t j = 1; j < seen; j++) top = line[j] > top ? line[j] : top;
        double sum = 0;
        for (uint32_t j = 0; j < seen; j++) sum += line[j] = softmax_exp(line[j] - top);
        float share = (float)(1.0 / (sum * window));
        for (uint32_t j = 0; j < old; j++) u[j] += line[j] * share;
    }
}

// out[j] += weight * pool(u)[j]
static void add_pooled(float *out, const float *u, uint32_t n, int kernel, bool max_pool, float weight)
{
    int half = kernel / 2;
    for (int64_t j = 0; j < n; j++) {
        int64_t from = j - half < 0 ? 0 : j - half, to = j + half + 1 > n ? n : j + half + 1;
        float pooled = max_pool ? u[from] : 0;
        for (int64_t i = from; i < to; i++) pooled = max_pool ? fmaxf(pooled, u[i]) : pooled + u[i];
        out[j] += weight * (max_pool ? pooled : pooled / (float)kernel);
    }
}

kvb_status score_snapkv(const metric *m, const layer_view *view, float *s, kvb_error *err)
{
    uint32_t T = view->n_tokens, H = view->n_heads, G = view->n_kv_heads, window = (uint32_t)metric_value(m, "window");
    int kernel = (int)metric_value(m, "kernel"), failures = 0;
    bool max_pool = metric_value(m, "max_pool") != 0, lukv = strcmp(m->kind->variant, "lukv") == 0;
    if (T <= window)
        return kvb_fail(err, KVB_ARGUMENT,
                        "metric %s: the context has %u tokens, expected more than the window of %u; use a longer "
                        "context or :window=N",
                        m->spec, T, window);
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures)
    for (uint32_t g = 0; g < G; g++) {
        float *scratch = malloc(((size_t)window + 1) * T * sizeof(float));
        if (!scratch) {
            failures++;
            continue;
        }
        memset(s + (size_t)g * T, 0, T * sizeof(float));
        for (uint32_t h = g * (H / G); h < (g + 1) * (H / G); h++) {
            window_attention(scratch, scratch + T, view, h, window);
            add_pooled(s + (size_t)g * T, scratch, T - window, kernel, max_pool, 1.0f / (float)(H / G));
        }
        free(scratch);
    }
    if (failures)
        return kvb_fail(err, KVB_MEMORY, "metric %s: no memory for %u x %u attention rows", m->spec, window, T);
    float top = 0;
    for (uint32_t g = 0; g < G; g++)
        for (uint32_t j = 0; j < T - window; j++) top = fmaxf(top, s[(size_t)g * T + j]);
    for (uint32_t g = 0; g < G; g++)
        for (uint32_t j = T - window; j < T; j++) s[(size_t)g * T + j] = lukv ? top : top + 1;
    return KVB_OK;
}
