// An emulated CUDA device for tests: backend_cuda.cu is compiled as C++ with this header in place of NVIDIA's, so that
// the same source of its kernels and host code runs on the CPU. Blocks run one after the other; the threads of a block
// are fibers that stop at barriers and shuffles. It finds wrong indices (with AddressSanitizer: reads and writes
// outside an allocation), missing barriers (by other orders of threads), barriers that some threads do not reach,
// missing waits for the stream, and uninitialised memory. It cannot find what only hardware shows: speed, limits of
// registers and shared memory, rounding of the device's own exponentials.
#pragma once
#include "tests/cuda/emulator.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static // blocks run one after the other
#define __launch_bounds__(threads)
static constexpr unsigned EMULATED_WARP = 32;

struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#include "tests/cuda/threads.h"

// ---- Streams --------------------------------------------------------------------------------------------------------

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaStreamNonBlocking = 1, cudaHostAllocDefault = 0 };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };

typedef struct emulated_stream {
    std::deque<std::function<void()>> work;
} * cudaStream_t;
static struct {
    bool lazy;
    std::map<void *, size_t> memory;
    size_t taken, limit;
    int devices;
    int64_t fail_launch;
    cudaError_t last;
    cudaStream_t stream; // the only one
} runtime = {false, {}, 0, SIZE_MAX, 1, -1, cudaSuccess, NULL};

extern "C" void emulator_set_order(emulator_order order)
{
    emulator.how = order;
}
extern "C" void emulator_set_lazy(bool lazy)
{
    runtime.lazy = lazy;
}
extern "C" void emulator_set_memory(size_t bytes)
{
    runtime.limit = bytes;
}
extern "C" size_t emulator_memory_taken(void)
{
    return runtime.taken;
}
extern "C" void emulator_set_devices(int count)
{
    runtime.devices = count;
}
extern "C" void emulator_fail_launch(int64_t number)
{
    runtime.fail_launch = number;
}
static cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    while (!stream->work.empty()) {
        std::function<void()> work = std::move(stream->work.front());
        stream->work.pop_front();
        work();
    }
    return cudaSuccess;
}

static cudaError_t stream_add(cudaStream_t stream, std::function<void()> work)
{
    stream->work.push_back(std::move(work));
    return runtime.lazy ? cudaSuccess : cudaStreamSynchronize(stream);
}

struct cudaFuncAttributes {
};
template <typename... P> static cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, void (*)(P...))
{
    return cudaSuccess;
}

template <typename... P, typename... A>
static void emulator_launch(cudaStream_t stream, dim3 blocks, dim3 threads, void (*kernel)(P...), A &&...arguments)
{
    if (runtime.fail_launch >= 0 && runtime.fail_launch-- == 0) {
        runtime.last = cudaErrorLaunchFailure;
        return;
    }
    // Sizes that hardware refuses.
    bool valid = blocks.x && blocks.y && blocks.z && blocks.x < 1u << 31 && blocks.y < 65536 && blocks.z < 65536 &&
                 threads.x && threads.x <= 1024 && threads.y == 1 && threads.z == 1;
    if (!valid) {
        runtime.last = cudaErrorInvalidConfiguration;
        return;
    }
    std::tuple<P...> copied(std::forward<A>(arguments)...);
    stream_add(stream, [=] { run_kernel(blocks, threads, [&] { std::apply(kernel, copied); }); });
}
#define CUDA_LAUNCH(kernel, blocks, threads, ...) emulator_launch(gpu.stream, blocks, threads, kernel, __VA_ARGS__)

static cudaError_t cudaGetLastError(void)
{
    cudaError_t last = runtime.last;
    runtime.last = cudaSuccess;
    return last;
}

static const char *cudaGetErrorName(cudaError_t code)
{
    return code == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOther";
}

static const char *cudaGetErrorString(cudaError_t code)
{
    return code == cudaErrorMemoryAllocation ? "out of memory"
           : code == cudaErrorNoDevice       ? "no device"
                                             : "emulated failure";
}

static cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = runtime.stream = new emulated_stream;
    return cudaSuccess;
}

static cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaStreamSynchronize(stream);
    delete stream;
    runtime.stream = NULL;
    return cudaSuccess;
}

// ---- Memory: new memory is filled with NaN, so that no code relies on zeros -----------------------------------------

static cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    *memory = NULL;
    if (bytes > runtime.limit || runtime.taken > runtime.limit - bytes) return runtime.last = cudaErrorMemoryAllocation;
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!*memory) return runtime.last = cudaErrorMemoryAllocation;
    memset(*memory, 0xff, bytes);
    runtime.memory[*memory] = bytes;
    runtime.taken += bytes;
    return cudaSuccess;
}

static cudaError_t cudaFree(void *memory)
{
    if (!runtime.memory.count(memory)) return cudaErrorInvalidValue;
    if (runtime.stream) cudaStreamSynchronize(runtime.stream); // as cudaFree does
    runtime.taken -= runtime.memory[memory];
    runtime.memory.erase(memory);
    free(memory);
    return cudaSuccess;
}

static cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned)
{
    *memory = malloc(bytes);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

static cudaError_t cudaFreeHost(void *memory)
{
    free(memory);
    return cudaSuccess;
}

static cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all)
{
    *all = runtime.limit;
    *free_bytes = runtime.limit > runtime.taken ? runtime.limit - runtime.taken : 0;
    return cudaSuccess;
}

static cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream)
{
    return stream_add(stream, [=] { memcpy(to, from, bytes); });
}

static cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    return stream_add(stream, [=] { memset(to, value, bytes); });
}

static cudaError_t cudaGetDeviceCount(int *count)
{
    *count = runtime.devices;
    return runtime.devices ? cudaSuccess : cudaErrorNoDevice;
}

static cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

static cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

static cudaError_t cudaSetDevice(int device)
{
    return device < runtime.devices ? cudaSuccess : cudaErrorInvalidValue;
}

static cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int)
{
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
    return cudaSuccess;
}

#include "tests/cuda/emulated_blas.h"
