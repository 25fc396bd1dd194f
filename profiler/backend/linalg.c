#include "profiler/backend/linalg.h"
#include "formats/need.h"
#include <dnnl.h>
#include <omp.h>

void gemm(bool trans_a, bool trans_b, size_t m, size_t n, size_t k, float alpha, const float *a, size_t lda,
          const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
    // For oneDNN a parallel region of one thread is none, and it would use as many threads as a nested region may have
    // (OMP_NUM_THREADS=1,2). The setting ends with the region.
    if (omp_get_level() > 0 && omp_get_max_threads() > 1) omp_set_num_threads(1);
    // dnnl_sgemm is row-major. Its only failures are bad arguments and lack of scratch memory; shapes are ours and
    // checked.
    bool done = dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', (dnnl_dim_t)m, (dnnl_dim_t)n, (dnnl_dim_t)k, alpha,
                           a, (dnnl_dim_t)lda, b, (dnnl_dim_t)ldb, beta, c, (dnnl_dim_t)ldc) == dnnl_success;
    needed(done ? c : NULL, "matrix products");
}
