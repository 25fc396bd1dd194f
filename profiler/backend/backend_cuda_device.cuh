// The device's state: the first error, memory, small host arrays on their way to kernels, and cuBLAS.
#pragma once
extern "C" {
#include "profiler/backend/backend.h"
#include "runtime/fail.h"
}
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if __has_include(<cublas_v2.h>) && !defined(CUDA_LAUNCH) // not for the emulated device of the tests
#include <cublas_v2.h>
#define HAVE_CUBLAS_HEADER 1
#else
#define HAVE_CUBLAS_HEADER 0
#endif

// cuBLAS is opened when the backend starts: a program that was built on a machine without cuBLAS, or runs on one, needs
// it only to compute. The few declarations below are its documented binary interface, the same since CUDA 12; if its
// header is there when this is compiled, they are checked against it.
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
// Never called: it compiles only if the order of arguments is the one above.
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

// Host arrays that one call needs (token ids, positions, rows) go through pinned memory, so that no call waits for the
// device. Every layer needs the same arrays again: the last few are remembered.
static constexpr size_t NOTE_BYTES = 1 << 20;
static constexpr uint32_t NOTES_KEPT = 4;
struct notes {
    char *host, *device; // [NOTE_BYTES]
    size_t used;
    struct {
        size_t at, bytes;
    } kept[NOTES_KEPT];
    uint32_t next;
};

struct device_piece {
    void *memory;
    size_t bytes;
};

// Pieces of scratch memory (backend_cuda_memory.cuh says how large): parts of attention over decoded rows (row_pass); a
// product's input in bf16; input and output of a product of few rows; sums of value_weights, or sampled ids.
enum scratch_use { SCRATCH_PARTS, SCRATCH_ROUNDED, SCRATCH_PADDED, SCRATCH_SUMS, SCRATCH_PIECES };

// What all open devices share; there is one stream, so that everything runs in the order of calls.
static struct {
    uint32_t users;    // open devices
    kvb_status failed; // of the first operation that failed; nothing runs after it
    kvb_error error;
    cudaStream_t stream;
    blas_library blas;
    notes to_device;
} gpu;

// What each of them has for itself.
struct cuda_device {
    backend_device base;
    uint16_t planes; // of weights and of a product's input: 0: f32; 1: bf16; 2: bf16x3
    device_piece scratch[SCRATCH_PIECES];
};

static cuda_device *cuda_of(backend_device *on)
{
    return (cuda_device *)(void *)on;
}

// Remembers the first failure. Returns true while there is none.
static bool gpu_note(cudaError_t code, const char *what)
{
    if (code != cudaSuccess && gpu.failed == KVB_OK)
        gpu.failed =
            kvb_fail(&gpu.error, code == cudaErrorMemoryAllocation ? KVB_MEMORY : KVB_UNSUPPORTED,
                     "backend cuda: %s failed: %s (%s)%s", what, cudaGetErrorString(code), cudaGetErrorName(code),
                     code == cudaErrorMemoryAllocation ? "; use fewer questions at a time or shorter contexts"
                                                       : "; nothing after it is valid, start again");
    return gpu.failed == KVB_OK;
}

static bool gpu_works(void)
{
    return gpu.failed == KVB_OK;
}

// Runs a kernel on the device's stream, unless something has failed before. No operation launches an empty grid.
#ifndef CUDA_LAUNCH
#define CUDA_LAUNCH(kernel, blocks, threads, ...) kernel<<<blocks, threads, 0, gpu.stream>>>(__VA_ARGS__)
#endif
#define LAUNCH(name, kernel, blocks, threads, ...)             \
    do {                                                       \
        if (gpu_works()) {                                     \
            CUDA_LAUNCH(kernel, blocks, threads, __VA_ARGS__); \
            gpu_note(cudaGetLastError(), name);                \
        }                                                      \
    } while (0)

static unsigned blocks_of(size_t n, size_t each)
{
    return (unsigned)((n + each - 1) / each);
}

// Launches one thread for each of `n` elements; n may be 0.
#define LAUNCH_EACH(name, kernel, n, ...) \
    if (n) LAUNCH(name, kernel, blocks_of(n, ROW_THREADS), ROW_THREADS, __VA_ARGS__)

// Returns device memory, not cleared, or NULL if there is none left.
static void *gpu_memory(size_t bytes)
{
    void *memory = NULL;
    if (!gpu_works()) return NULL;
    cudaError_t code = cudaMalloc(&memory, bytes ? bytes : 16);
    if (code == cudaSuccess) return memory;
    cudaGetLastError(); // clears the error, which is reported here: the next launch must not find it
    if (code != cudaErrorMemoryAllocation) gpu_note(code, "cudaMalloc");
    return NULL;
}

// Waits first: kernels that were launched before may still use the memory.
static void gpu_free(void *memory)
{
    if (!memory) return;
    gpu_note(cudaStreamSynchronize(gpu.stream), "a kernel");
    gpu_note(cudaFree(memory), "cudaFree");
}

// Returns a host array of at most NOTE_BYTES as kernels see it, until another NOTE_BYTES of arrays have been taken.
static const void *gpu_take(const void *host, size_t bytes)
{
    notes *n = &gpu.to_device;
    if (!gpu_works()) return NULL;
    if (bytes > NOTE_BYTES) {
        gpu_note(cudaErrorInvalidValue, "a call with more rows than were promised");
        return NULL;
    }
    for (uint32_t i = 0; i < NOTES_KEPT; i++)
        if (n->kept[i].bytes == bytes && memcmp(n->host + n->kept[i].at, host, bytes) == 0)
            return n->device + n->kept[i].at;
    if (n->used + bytes > NOTE_BYTES) { // the start may be overwritten only when all kernels that read it are done
        if (!gpu_note(cudaStreamSynchronize(gpu.stream), "waiting for the device")) return NULL;
        n->used = 0;
        memset(n->kept, 0, sizeof n->kept);
    }
    size_t at = n->used;
    memcpy(n->host + at, host, bytes);
    gpu_note(cudaMemcpyAsync(n->device + at, n->host + at, bytes, cudaMemcpyHostToDevice, gpu.stream),
             "copy to the device");
    n->used = (at + bytes + 15) / 16 * 16;
    n->kept[n->next].at = at;
    n->kept[n->next].bytes = bytes;
    n->next = (n->next + 1) % NOTES_KEPT;
    return n->device + at;
}

// Returns this process's number on its machine, by which processes share devices: MPI launchers and Slurm set it.
static int local_rank(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *text = getenv(names[i]);
        if (text && *text) return atoi(text) < 0 ? 0 : atoi(text);
    }
    return 0;
}

static kvb_status device_choose(kvb_error *err)
{
    int count = 0, major = 0, minor = 0, driver = 0, runtime = 0;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
        return kvb_fail(err, KVB_UNSUPPORTED, "no CUDA device: no NVIDIA driver is installed here; use --backend cpu");
    if (code == cudaErrorInsufficientDriver && cudaRuntimeGetVersion(&runtime) == cudaSuccess)
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "no CUDA device: the driver is made for CUDA %d.%d, this program for %d.%d; install a newer driver, or "
            "build with an older toolkit (CUDA_HOME)",
            driver / 1000, driver % 100 / 10, runtime / 1000, runtime % 100 / 10);
    if (code != cudaSuccess || count < 1)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "no CUDA device: %s; use --backend cpu, or see that `nvidia-smi` lists a device here",
                        code == cudaSuccess ? "the driver lists none" : cudaGetErrorString(code));
    int device = local_rank() % count;
    code = cudaSetDevice(device);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (code != cudaSuccess)
        return kvb_fail(err, KVB_UNSUPPORTED, "no CUDA device: device %d of %d does not start: %s", device, count,
                        cudaGetErrorString(code));
    if (major < 8)
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "no CUDA device: device %d has compute capability %d.%d, expected 8.0 or more (Ampere and later)", device,
            major, minor);
    return KVB_OK;
}

static kvb_status device_start(kvb_error *err)
{
    kvb_status status = device_choose(err);
    if (status != KVB_OK) return status;
    cudaError_t code = cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking);
    if (code == cudaSuccess) code = cudaMalloc((void **)&gpu.to_device.device, NOTE_BYTES);
    if (code == cudaSuccess) code = cudaHostAlloc((void **)&gpu.to_device.host, NOTE_BYTES, cudaHostAllocDefault);
    if (code != cudaSuccess)
        return kvb_fail(err, code == cudaErrorMemoryAllocation ? KVB_MEMORY : KVB_UNSUPPORTED,
                        "backend cuda: the device does not start: %s; is its memory in use by others?",
                        cudaGetErrorString(code));
    return blas_open(&gpu.blas, gpu.stream, err);
}

// Cleans up, also after a start that failed halfway.
static void device_stop(void)
{
    if (gpu.blas.handle) gpu.blas.destroy(gpu.blas.handle);
    if (gpu.blas.file) dlclose(gpu.blas.file);
    if (gpu.to_device.device) cudaFree(gpu.to_device.device);
    if (gpu.to_device.host) cudaFreeHost(gpu.to_device.host);
    if (gpu.stream) cudaStreamDestroy(gpu.stream);
    memset(&gpu, 0, sizeof gpu);
}
