// cuBLAS, opened when the backend starts: a program that was built on a machine without cuBLAS, or runs on one, needs
// it only to compute. The few declarations below are its documented binary interface, the same since CUDA 12; where its
// header is there when this is compiled, it checks them.
#pragma once
extern "C" {
#include "runtime/fail.h"
}
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#if __has_include(<cublas_v2.h>) && !defined(CUDA_LAUNCH) // not for the emulated device of the tests
#include <cublas_v2.h>
#define HAVE_CUBLAS_HEADER 1
#else
#define HAVE_CUBLAS_HEADER 0
#endif

enum { // cublasOperation_t, cublasComputeType_t, cublasGemmAlgo_t, cublasMath_t, cudaDataType
    BLAS_N = 0,
    BLAS_T = 1,
    BLAS_COMPUTE_F32 = 68,
    BLAS_GEMM_DEFAULT = -1,
    BLAS_F32 = 0,
    BLAS_BF16 = 14,
    BLAS_F32_REDUCTIONS = 16, // no TF32, and partial sums of bf16 products stay in float32
};

struct blas_library {
    void *file, *handle;
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, cudaStream_t stream);
    int (*set_math)(void *handle, int mode);
    // C [m,n] = alpha op(A) op(B) + beta C, column-major
    int (*gemm)(void *handle, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a,
                int type_a, int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc,
                int compute, int algorithm);
};

#if HAVE_CUBLAS_HEADER
static_assert(int(CUBLAS_OP_N) == BLAS_N && int(CUBLAS_OP_T) == BLAS_T && int(CUBLAS_COMPUTE_32F) == BLAS_COMPUTE_F32,
              "cuBLAS differs");
static_assert(int(CUBLAS_GEMM_DEFAULT) == BLAS_GEMM_DEFAULT && int(CUDA_R_32F) == BLAS_F32 &&
                  int(CUDA_R_16BF) == BLAS_BF16,
              "cuBLAS differs");
static_assert(int(CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION) == BLAS_F32_REDUCTIONS &&
                  CUBLAS_STATUS_SUCCESS == 0 && sizeof(cublasStatus_t) == sizeof(int) &&
                  sizeof(cublasComputeType_t) == sizeof(int),
              "cuBLAS differs");
// Not called: it compiles only where the order of arguments is the one above.
[[maybe_unused]] static int blas_check(void *h, const void *x, void *y, int n)
{
    return cublasGemmEx((cublasHandle_t)h, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, x, x, CUDA_R_32F, n, x, CUDA_R_32F, n, x,
                        y, CUDA_R_32F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}
#endif

static kvb_status blas_open(blas_library *blas, cudaStream_t stream, kvb_error *err)
{
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
    for (size_t i = 0; !blas->file && i < sizeof names / sizeof *names; i++)
        blas->file = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!blas->file)
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "backend cuda: libcublas.so.13 (or .12) is not found (%s); install cuBLAS, and name its folder in "
            "LD_LIBRARY_PATH if it is not where the system looks",
            dlerror());
    const struct {
        const char *name;
        void *to;
    } functions[] = {{"cublasCreate_v2", &blas->create},
                     {"cublasDestroy_v2", &blas->destroy},
                     {"cublasSetStream_v2", &blas->set_stream},
                     {"cublasSetMathMode", &blas->set_math},
                     {"cublasGemmEx", &blas->gemm}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *symbol = dlsym(blas->file, functions[i].name);
        if (!symbol)
            return kvb_fail(err, KVB_UNSUPPORTED, "backend cuda: cuBLAS has no function %s; expected CUDA 12 or 13",
                            functions[i].name);
        memcpy(functions[i].to, &symbol, sizeof symbol);
    }
    int code = blas->create(&blas->handle);
    if (code == 0) code = blas->set_stream(blas->handle, stream);
    if (code == 0) code = blas->set_math(blas->handle, BLAS_F32_REDUCTIONS);
    if (code != 0)
        return kvb_fail(err, code == 3 ? KVB_MEMORY : KVB_UNSUPPORTED,
                        "backend cuda: cuBLAS does not start, status %d%s; is the device's memory in use by others?",
                        code, code == 1 || code == 8 ? " (its version does not fit the driver or the device)" : "");
    return KVB_OK;
}
