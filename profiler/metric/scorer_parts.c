#include "profiler/metric/scorer_parts.h"
#include "runtime/fail.h"
#include <math.h>
#include <string.h>

static void cap_line(float *line, uint32_t seen, float cap)
{
    for (uint32_t j = 0; j < seen; j++) line[j] = cap * tanhf(line[j] / cap);
}

// Turns a line's scores into attention. `sink` is one more score in the softmax; -INFINITY: there is none.
SIMD_CLONES static void softmax_line(float *line, uint32_t seen, float sink)
{
    float top = sink > line[0] ? sink : line[0], sum = 0;
#pragma omp simd reduction(max : top)
    for (uint32_t j = 1; j < seen; j++) top = line[j] > top ? line[j] : top;
#pragma omp simd reduction(+ : sum)
    for (uint32_t j = 0; j < seen; j++) {
        float e = softmax_exp(line[j] - top);
        line[j] = e;
        sum += e;
    }
    if (sink > -INFINITY) sum += softmax_exp(sink - top);
    float share = 1.0f / sum;
#pragma omp simd
    for (uint32_t j = 0; j < seen; j++) line[j] *= share;
}

void attention_rows(float *out, const layer_view *view, uint32_t h, uint32_t first, uint32_t n)
{
    uint32_t T = view->n_tokens, d = view->head_dim, H = view->n_heads;
    const float *k = view->k + (size_t)(h / (H / view->n_kv_heads)) * T * d;
    float sink = view->sinks ? view->sinks[h] : -INFINITY;
    gemm(false, true, n, T, d, (float)view_scale(view), view->q + ((size_t)first * H + h) * d, (size_t)H * d, k, d,
         0.0f, out, T);
    for (uint32_t w = 0; w < n; w++) {
        float *line = out + (size_t)w * T;
        uint32_t seen = T - view->n_queries + first + w + 1;
        if (view->softcap > 0) cap_line(line, seen, view->softcap);
        softmax_line(line, seen, sink);
        memset(line + seen, 0, (T - seen) * sizeof(float));
    }
}

void group_attention_rows(float *out, float *scratch, const layer_view *view, uint32_t g, uint32_t first, uint32_t n)
{
    uint32_t group = view->n_heads / view->n_kv_heads;
    attention_rows(out, view, g * group, first, n);
    for (uint32_t h = 1; h < group; h++) {
        attention_rows(scratch, view, g * group + h, first, n);
        for (size_t i = 0; i < (size_t)n * view->n_tokens; i++) out[i] += scratch[i];
    }
}

kvb_status check_window(const metric *m, const layer_view *view, uint32_t window, kvb_error *err)
{
    if (view->n_queries < window)
        return kvb_fail(err, KVB_ARGUMENT, "metric %s: the view has the last %u queries, expected at least %u", m->spec,
                        view->n_queries, window);
    return KVB_OK;
}

void fill_tail(float *s, const layer_view *view, uint32_t tail, float above)
{
    uint32_t T = view->n_tokens;
    float top = 0;
    for (uint32_t g = 0; g < view->n_kv_heads; g++)
        for (uint32_t j = 0; j < T - tail; j++) top = fmaxf(top, s[(size_t)g * T + j]);
    for (uint32_t g = 0; g < view->n_kv_heads; g++)
        for (uint32_t j = T - tail; j < T; j++) s[(size_t)g * T + j] = top + above;
}

// out[j] = max of x[j .. min(j + width, n) - 1]: the maximum of two overlapping runs of a power of two each.
static void max_ahead(float *out, const float *x, uint32_t n, uint32_t width)
{
    uint32_t run = 1;
    if (out != x) memcpy(out, x, n * sizeof(float));
    while (2 * run <= width) {
        for (uint32_t j = 0; j + run < n; j++) out[j] = out[j + run] > out[j] ? out[j + run] : out[j];
        run *= 2;
    }
    uint32_t shift = width - run;
    for (uint32_t j = 0; shift && j + shift < n; j++) out[j] = out[j + shift] > out[j] ? out[j + shift] : out[j];
}

void pool_row(float *out, const float *x, float *scratch, uint32_t n, uint32_t kernel, bool max_pool)
{
    uint32_t half = kernel / 2;
    if (!max_pool) {
        for (int64_t j = 0; j < n; j++) {
            int64_t from = j < half ? 0 : j - half, to = j + half + 1 > n ? n : j + half + 1;
            float sum = 0;
            for (int64_t i = from; i < to; i++) sum += x[i];
            out[j] = sum / (float)kernel;
        }
        return;
    }
    // The pool around j runs from j - half to j + half; if it extends beyond the left edge, it is a shorter run from 0.
    max_ahead(scratch, x, n, kernel);
    for (uint32_t j = half; j < n; j++) out[j] = scratch[j - half];
    float top = -INFINITY;
    uint32_t right = 0;
    for (uint32_t j = 0; j < half && j < n; j++) {
        for (; right <= j + half && right < n; right++) top = x[right] > top ? x[right] : top;
        out[j] = top;
    }
}

kvb_status check_kernel(const metric *m, kvb_error *err)
{
    return fmod(metric_value(m, "kernel", 1), 2) == 1
               ? KVB_OK
               : kvb_fail(err, KVB_ARGUMENT,
                          "metric %s: kernel must be odd, so that a position is in the middle of its pool", m->spec);
}
