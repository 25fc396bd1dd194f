// The device's state: errors that stick, memory, and small host arrays on their way to kernels.
#pragma once
extern "C" {
#include "profiler/backend/backend.h"
}
#include "profiler/backend/backend_cuda_blas.cuh"
#include <stdlib.h>
#include <string.h>

struct weight;

// Host arrays that one call needs (token ids, positions, rows) go through pinned memory, so that no call waits for the
// device. The same array is asked for again in every layer: the last few are remembered.
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

// Pieces of scratch memory (backend_cuda_scratch.cuh says how large): of attention over decoded rows, see row_pass; a
// product's input in bf16; input and output of a product of few rows; sums of value_weights and moments, sampled ids.
enum scratch_use { SCRATCH_PARTS, SCRATCH_ROUNDED, SCRATCH_PADDED, SCRATCH_SUMS, SCRATCH_PIECES };

// What all that are open share: one stream, so that everything runs in the order of calls.
static struct {
    uint32_t users;    // open devices
    kvb_status failed; // of the first operation that failed; nothing runs after it
    kvb_error error;
    cudaStream_t stream, copies; // operations; weights on their way to the device
    blas_library blas;
    notes to_device;
    device_piece full; // a weight in f32, on its way to bf16; grows to the largest
} gpu;

// What one of them has for itself.
struct cuda_device {
    backend_device base;
    uint16_t planes; // of weights and of a product's input: 0: f32; 1: bf16; 2: bf16x3
    device_piece scratch[SCRATCH_PIECES];
};

static cuda_device *cuda_of(backend_device *on)
{
    return (cuda_device *)(void *)on;
}

// Remembers the first failure. True while there is none.
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
#define CUDA_LAUNCH(kernel, blocks, threads, shared, ...) kernel<<<blocks, threads, shared, gpu.stream>>>(__VA_ARGS__)
#endif
#define LAUNCH(name, kernel, blocks, threads, ...)                \
    do {                                                          \
        if (gpu_works()) {                                        \
            CUDA_LAUNCH(kernel, blocks, threads, 0, __VA_ARGS__); \
            gpu_note(cudaGetLastError(), name);                   \
        }                                                         \
    } while (0)

// The same for kernels with DYNAMIC_SHARED memory of this many bytes: above 48 KiB a kernel must ask for it, below that
// it does no harm.
#define LAUNCH_SHARED(name, kernel, blocks, threads, bytes, ...)                                                       \
    do {                                                                                                               \
        if (gpu_works() &&                                                                                             \
            gpu_note(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)), name)) { \
            CUDA_LAUNCH(kernel, blocks, threads, bytes, __VA_ARGS__);                                                  \
            gpu_note(cudaGetLastError(), name);                                                                        \
        }                                                                                                              \
    } while (0)

static unsigned blocks_of(size_t n, size_t each)
{
    return (unsigned)((n + each - 1) / each);
}

static bool weights_give_way(void); // backend_cuda_weights.cuh

// Device memory, not cleared, or NULL when there is none left even after weights have moved to the host.
static void *gpu_memory(size_t bytes)
{
    void *memory = NULL;
    if (!gpu_works()) return NULL;
    for (;;) {
        cudaError_t code = cudaMalloc(&memory, bytes ? bytes : 16);
        if (code == cudaSuccess) return memory;
        cudaGetLastError(); // it is reported here and must not be found by the next launch
        if (code != cudaErrorMemoryAllocation) {
            gpu_note(code, "cudaMalloc");
            return NULL;
        }
        if (!weights_give_way()) return NULL;
    }
}

// Kernels that were launched before may still use it.
static void gpu_free(void *memory)
{
    if (!memory) return;
    gpu_note(cudaStreamSynchronize(gpu.stream), "a kernel");
    gpu_note(cudaFree(memory), "cudaFree");
}

static void growing_release(device_piece *p)
{
    gpu_free(p->memory);
    *p = {NULL, 0};
}

// At least `bytes`; false when there is no memory. What it held before is lost.
static bool growing_take(device_piece *p, size_t bytes)
{
    if (p->bytes >= bytes) return true;
    growing_release(p);
    p->memory = gpu_memory(bytes);
    p->bytes = p->memory ? bytes : 0;
    return p->memory != NULL;
}

// A host array of at most NOTE_BYTES as kernels see it; valid for what is launched before the next 1 MiB of notes.
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

// Several processes of one machine share its devices out: MPI launchers and Slurm number them.
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
    if (code == cudaSuccess) code = cudaStreamCreateWithFlags(&gpu.copies, cudaStreamNonBlocking);
    if (code == cudaSuccess) code = cudaMalloc((void **)&gpu.to_device.device, NOTE_BYTES);
    if (code == cudaSuccess) code = cudaHostAlloc((void **)&gpu.to_device.host, NOTE_BYTES, cudaHostAllocDefault);
    if (code != cudaSuccess)
        return kvb_fail(err, code == cudaErrorMemoryAllocation ? KVB_MEMORY : KVB_UNSUPPORTED,
                        "backend cuda: the device does not start: %s; is its memory in use by others?",
                        cudaGetErrorString(code));
    return blas_open(&gpu.blas, gpu.stream, err);
}

// Leaves nothing behind of a start that failed half way.
static void device_stop(void)
{
    if (gpu.full.memory) cudaFree(gpu.full.memory);
    if (gpu.blas.handle) gpu.blas.destroy(gpu.blas.handle);
    if (gpu.blas.file) dlclose(gpu.blas.file);
    if (gpu.to_device.device) cudaFree(gpu.to_device.device);
    if (gpu.to_device.host) cudaFreeHost(gpu.to_device.host);
    if (gpu.copies) cudaStreamDestroy(gpu.copies);
    if (gpu.stream) cudaStreamDestroy(gpu.stream);
    memset(&gpu, 0, sizeof gpu);
}
