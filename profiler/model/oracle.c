#include "profiler/model/oracle.h"
#include "formats/need.h"
#include "profiler/backend/linalg.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// gram [d,d] = W W^T for W [d, width] = d columns of wo from `column` on, transposed.
SIMD_CLONES static void head_gram(double *gram, const float *wo, uint32_t width, size_t ld, size_t column, size_t d)
{
    memset(gram, 0, d * d * sizeof *gram);
    for (uint32_t row = 0; row < width; row++) {
        const float *w = wo + row * ld + column;
        for (size_t a = 0; a < d; a++) {
            double wa = w[a], *line = gram + a * d;
            for (size_t b = 0; b <= a; b++) line[b] += wa * w[b];
        }
    }
    for (size_t a = 0; a < d; a++)
        for (size_t b = a + 1; b < d; b++) gram[a * d + b] = gram[b * d + a];
}

// Pivoted Cholesky: each row of root is made from what is left of the largest diagonal element, and its outer product
// is subtracted from the Gram matrix. Stops when only rounding errors are left (a head of deficient rank, or of zeros),
// which must not be divided by: the remaining rows are zero. `row` is scratch [d]; gram is overwritten.
SIMD_CLONES static void gram_root(float *root, double *gram, double *row, size_t d)
{
    double nothing = 0;
    memset(root, 0, d * d * sizeof *root);
    for (size_t r = 0; r < d; r++) {
        size_t p = 0;
        for (size_t c = 1; c < d; c++) p = gram[c * d + c] > gram[p * d + p] ? c : p;
        if (r == 0) nothing = gram[p * d + p] * (double)d * DBL_EPSILON;
        if (!(gram[p * d + p] > nothing)) return;
        double inverse = 1.0 / sqrt(gram[p * d + p]);
        for (size_t c = 0; c < d; c++) row[c] = gram[p * d + c] * inverse;
        for (size_t a = 0; a < d; a++)
            for (size_t b = 0; b < d; b++) gram[a * d + b] -= row[a] * row[b];
        for (size_t c = 0; c < d; c++) {
            gram[p * d + c] = gram[c * d + p] = 0; // exactly, so that p is not chosen again
            root[r * d + c] = (float)row[c];
        }
    }
}

void oracle_value_root(float *root, const float *wo, uint32_t width, uint32_t n_heads, uint32_t head_dim)
{
    size_t d = head_dim;
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t h = 0; h < n_heads; h++) {
        double *gram = need((d + 1) * d, sizeof *gram, "values of a head's Gram matrix");
        head_gram(gram, wo, width, (size_t)n_heads * d, h * d, d);
        gram_root(root + h * d * d, gram, gram + d * d, d);
        free(gram);
    }
}
