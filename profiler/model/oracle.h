// Oracle importance (methods.md 2.1; LU-KV eq. 4 with the layer normalisation of its released code):
//
//     w[h,j] = ||v_j W_O^(h)|| / (sum over h', j' of the same + 1e-9)    one sum per layer: all heads and positions
//     I[g,j] = max over steps k, max over h in group g, of A[h,k,j] * w[h,j]
// The maximum is taken inside the backend's attention (backend.h, attend_rows); this part depends on weights only.
#pragma once
#include <stdint.h>

// root [H,d,d] with root_h^T root_h = W_O^(h) W_O^(h)T, so that ||v W_O^(h)|| = ||root_h v|| costs d^2 instead of d*D
// and, being a norm of a product and not a difference, loses no digits in float32. wo is the output projection [D,
// H*d]; the Gram matrix and its factor (pivoted Cholesky: heads of deficient rank are fine) are computed in double.
void oracle_value_root(float *root, const float *wo, uint32_t width, uint32_t n_heads, uint32_t head_dim);
