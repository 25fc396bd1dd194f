#include "evaluator/window_attention.h"
#include "profiler/metric/scorer_parts.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

window_attention window_attention_open(uint32_t n_layers, uint32_t n_kv_heads, uint32_t n_tokens)
{
    return (window_attention){.score = need((size_t)n_layers * n_kv_heads * n_tokens, sizeof(float), "scores"),
                              .entropy = need(n_layers, sizeof(double), "layers"),
                              .dispersion = need(n_layers, sizeof(double), "layers"),
                              .shift = need(n_layers, sizeof(double), "layers")};
}

void window_attention_free(window_attention *a)
{
    free_all(a->score, a->entropy, a->dispersion, a->shift);
    *a = (window_attention){0};
}

static double entropy_term(double p)
{
    return p > 0 ? -p * log(p) : 0;
}

// Adds one query head to CAKE's sums, and writes its mean over the queries, pooled, to pooled [old]. rows [W+2,T].
static void see_head(const layer_view *view, uint32_t h, uint32_t W, float *rows, float *pooled, double cake[2])
{
    uint32_t T = view->n_tokens, old = T - W;
    float *mean = rows + (size_t)W * T, *scratch = mean + T;
    attention_rows(rows, view, h, view->n_queries - W, W);
    for (uint32_t j = 0; j < old; j++) {
        double sum = 0, squares = 0;
        for (uint32_t w = 0; w < W; w++) {
            double p = (double)rows[(size_t)w * T + j];
            cake[0] += entropy_term(p);
            sum += p;
        }
        for (uint32_t w = 0; w < W; w++) {
            double off = (double)rows[(size_t)w * T + j] - sum / W;
            squares += off * off;
        }
        if (W > 1) cake[1] += squares / (W - 1);
        mean[j] = (float)(sum / W);
    }
    pool_row(pooled, mean, scratch, old, WINDOW_ATTENTION_KERNEL, true);
}

// Computes LAVa's scores of one KV head: the largest of its query heads' pooled means times its largest value norm.
static void see_group(const layer_view *view, uint32_t g, uint32_t W, float *score, double cake[2])
{
    uint32_t T = view->n_tokens, d = view->head_dim, old = T - W, group = view->n_heads / view->n_kv_heads;
    float *rows = need(((size_t)W + 3) * T, sizeof *rows, "attention"), *pooled = rows + ((size_t)W + 2) * T, top = 0;
    for (uint32_t k = 0; k < old; k++) {
        const float *v = view->v + ((size_t)g * T + k) * d;
        float norm = 0;
        for (uint32_t i = 0; i < d; i++) norm += fabsf(v[i]);
        top = fmaxf(top, norm);
    }
    memset(score, 0, T * sizeof *score);
    for (uint32_t h = g * group; h < (g + 1) * group; h++) {
        see_head(view, h, W, rows, pooled, cake);
        for (uint32_t j = 0; j < old; j++) score[j] = fmaxf(score[j], top * pooled[j]);
    }
    free(rows);
}

static double entropy_of_layer(const float *score, uint32_t n_heads, uint32_t n_tokens, uint32_t old)
{
    double sum = 0, entropy = 0;
    for (uint32_t g = 0; g < n_heads; g++)
        for (uint32_t j = 0; j < old; j++) sum += (double)score[(size_t)g * n_tokens + j];
    for (uint32_t g = 0; g < n_heads && sum > 0; g++)
        for (uint32_t j = 0; j < old; j++) entropy += entropy_term((double)score[(size_t)g * n_tokens + j] / sum);
    return n_heads * old > 1 ? entropy / log((double)n_heads * old) : 0;
}

void window_attention_see(window_attention *a, const layer_view *view)
{
    uint32_t T = view->n_tokens, G = view->n_kv_heads, l = a->n_layers++;
    uint32_t W = T > WINDOW_ATTENTION_QUERIES ? WINDOW_ATTENTION_QUERIES : T - 1;
    float *score = a->score + (size_t)l * G * T;
    double(*cake)[2] = need(G, sizeof *cake, "heads");
#pragma omp parallel for schedule(static)
    for (uint32_t g = 0; g < G; g++) see_group(view, g, W, score + (size_t)g * T, cake[g]);
    a->dispersion[l] = a->shift[l] = 0;
    for (uint32_t g = 0; g < G; g++) { // in this order, whatever the threads
        a->dispersion[l] += cake[g][0];
        a->shift[l] += cake[g][1];
    }
    a->entropy[l] = entropy_of_layer(score, G, T, T - W);
    fill_tail(score, view, W, 0);
    free(cake);
}
