// cuBLAS for the emulated device: column-major products by their definition, looked up by name as in the library.
// Part of tests/cuda/cuda_runtime.h.
#pragma once

static cudaStream_t blas_stream;

static float blas_value(const void *matrix, int type, size_t at)
{
    if (type == 0) return ((const float *)matrix)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)matrix)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static int emulated_gemm(void *, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a,
                         int type_a, int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c,
                         int ldc, int compute, int algorithm)
{
    float factor = *(const float *)alpha, keep = *(const float *)beta;
    bool valid = trans_a == 1 && trans_b == 0 && type_a == type_b && (type_a == 0 || type_a == 14) && type_c == 0 &&
                 compute == 68 && algorithm == -1 && m > 0 && n > 0 && k > 0 && lda >= k && ldb >= k && ldc >= m;
    if (!valid) return 7;
    stream_add(blas_stream, [=] {
        std::vector<float> left((size_t)m * k), right((size_t)n * k);
        for (size_t e = 0; e < left.size(); e++) left[e] = blas_value(a, type_a, e / k * lda + e % k);
        for (size_t e = 0; e < right.size(); e++) right[e] = blas_value(b, type_b, e / k * ldb + e % k);
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) {
                double sum = 0;
                for (int l = 0; l < k; l++) sum += (double)left[(size_t)i * k + l] * right[(size_t)j * k + l];
                float *to = (float *)c + (size_t)j * ldc + i;
                *to = (float)(factor * sum + (keep == 0.0f ? 0.0 : (double)keep * *to)); // not read if beta is 0
            }
    });
    return 0;
}

static int emulated_blas_create(void **handle)
{
    *handle = &blas_stream;
    return 0;
}

static int emulated_blas_nothing(void *)
{
    return 0;
}

static int emulated_blas_set_stream(void *, cudaStream_t stream)
{
    blas_stream = stream;
    return 0;
}

static int emulated_blas_set_math(void *, int mode)
{
    return mode == 16 ? 0 : 7;
}

static void *emulated_symbol(const char *name)
{
    static const std::map<std::string, void *> symbols = {{"cublasCreate_v2", (void *)emulated_blas_create},
                                                          {"cublasDestroy_v2", (void *)emulated_blas_nothing},
                                                          {"cublasSetStream_v2", (void *)emulated_blas_set_stream},
                                                          {"cublasSetMathMode", (void *)emulated_blas_set_math},
                                                          {"cublasGemmEx", (void *)emulated_gemm}};
    auto found = symbols.find(name);
    return found == symbols.end() ? NULL : found->second;
}
#define dlopen(name, mode) ((void *)&runtime)
#define dlsym(file, name) emulated_symbol(name)
#define dlclose(file) ((void)(file))
