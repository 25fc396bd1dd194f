// What methods that divide a cache over layers compute from the attention of the last W context queries, W =
// WINDOW_ATTENTION_QUERIES, or T - 1 if that is less. A[h,w,j] is query head h's attention from the w-th of these
// queries to position j < T - W.
//
//     CAKE (arXiv 2503.12491):  dispersion = - sum over h, w, j of A log A
//                               shift      = sum over h, j of the variance over w of A (divisor W - 1)
//     LAVa (arXiv 2509.09754):  s[g,j] = max over k < T - W of ||v_k||_1
//                                        * max over h in g of pool(mean over w of A[h,w])[j], maxima of 7 neighbours
//                               entropy = - sum over g, j of p log p / log(G (T - W)), p = s / its sum over the layer
#pragma once
#include "profiler/model/observe.h"

enum { WINDOW_ATTENTION_QUERIES = 32, WINDOW_ATTENTION_KERNEL = 7 };

// Collected from the budgeted layers, one after the other.
typedef struct window_attention {
    uint32_t n_layers;                    // seen so far
    float *score;                         // [L, G, T] LAVa's; the last W tokens have the layer's maximum
    double *entropy, *dispersion, *shift; // [L]
} window_attention;

// Allocates memory for L layers of G heads and T tokens. The caller frees it.
window_attention window_attention_open(uint32_t n_layers, uint32_t n_kv_heads, uint32_t n_tokens);
void window_attention_free(window_attention *a); // a zero struct is allowed; leaves it zero

enum { WINDOW_ATTENTION_NEEDS = VIEW_Q | VIEW_K | VIEW_V };

// Adds a layer. n_layers = 0 begins a new context, of at most T tokens.
void window_attention_see(window_attention *a, const layer_view *view);
