#include "profiler/oracle.h"
#include "runtime/fail.h"
#include <gsl/gsl_linalg.h>
#include <math.h>
#include <stdlib.h>

// gram [d,d] = W W^T for W [d, width] = columns head*d .. of wo, transposed.
static void head_gram(gsl_matrix *gram, const float *wo, uint32_t width, size_t ld, size_t column)
{
    size_t d = gram->size1;
    gsl_matrix_set_zero(gram);
    for (uint32_t row = 0; row < width; row++) {
        const float *w = wo + row * ld + column;
        for (size_t a = 0; a < d; a++) {
            double wa = w[a], *line = gram->data + a * gram->tda;
            for (size_t b = 0; b <= a; b++) line[b] += wa * w[b];
        }
    }
    for (size_t a = 0; a < d; a++)
        for (size_t b = a + 1; b < d; b++) gsl_matrix_set(gram, a, b, gsl_matrix_get(gram, b, a));
}

// P G P^T = L D L^T, so root = sqrt(D) L^T P; negative pivots are rounding of a zero.
static void gram_root(float *root, gsl_matrix *gram, gsl_permutation *pivot)
{
    size_t d = gram->size1;
    gsl_linalg_pcholesky_decomp(gram, pivot);
    for (size_t r = 0; r < d; r++) {
        double scale = sqrt(fmax(gsl_matrix_get(gram, r, r), 0.0));
        for (size_t c = 0; c < d; c++) {
            double l = c < r ? 0.0 : c == r ? 1.0 : gsl_matrix_get(gram, c, r);
            root[r * d + gsl_permutation_get(pivot, c)] = (float)(scale * l);
        }
    }
}

kvb_status oracle_value_root(float *root, const float *wo, uint32_t width, uint32_t n_heads, uint32_t head_dim,
                             kvb_error *err)
{
    int failures = 0;
    size_t d = head_dim;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures)
    for (uint32_t h = 0; h < n_heads; h++) {
        gsl_matrix *gram = gsl_matrix_alloc(d, d);
        gsl_permutation *pivot = gsl_permutation_alloc(d);
        if (gram && pivot) {
            head_gram(gram, wo, width, (size_t)n_heads * d, h * d);
            gram_root(root + h * d * d, gram, pivot);
        } else {
            failures++;
        }
        gsl_permutation_free(pivot);
        gsl_matrix_free(gram);
    }
    if (failures)
        return kvb_fail(err, KVB_MEMORY, "value norms: no memory for %u x %u matrices in double", head_dim, head_dim);
    return KVB_OK;
}
