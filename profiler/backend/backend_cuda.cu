// The CUDA backend: cuBLAS for products, kernels for the rest; the one file that nvcc sees, with the headers
// backend_cuda_*.cuh.
//
// Everything runs in the order of calls on one stream and no operation waits for the device, except those that bring
// something to the host. Numbers are float32; weights and a product's input are rounded to bf16 if the compute mode
// says so, sums stay float32. A row's numbers do not depend on the other rows of a call, except in products of whole
// chunks of a context: cuBLAS picks its kernel, and with it the order of a sum, by shape.
#include "profiler/backend/backend_cuda_attend.cuh"
#include "profiler/backend/backend_cuda_layer.cuh"

// Fails here, not at the first kernel, if the program was built for other devices or its PTX is newer than the driver.
static kvb_status check_code(kvb_error *err)
{
    cudaFuncAttributes found;
    cudaError_t code = cudaFuncGetAttributes(&found, gather_kernel);
    if (code == cudaSuccess) return KVB_OK;
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "backend cuda: this program has no code for the device: %s; build with CUDA_ARCHS=90 for compute "
                    "capability 9.0 and so on (nvidia-smi --query-gpu=compute_cap --format=csv)",
                    cudaGetErrorString(code));
}

static kvb_status cuda_check(backend_device *on, kvb_error *err)
{
    if (gpu_works()) gpu_note(cudaStreamSynchronize(gpu.stream), "a kernel");
    if (!gpu_works()) backend_fail(on, gpu.failed, "%s", gpu.error.message);
    return host_check(on, err);
}

// The first user starts the device, the last one to leave stops it.
static kvb_status gpu_join(kvb_error *err)
{
    if (gpu.users++) return KVB_OK;
    kvb_status status = device_start(err);
    return status == KVB_OK ? check_code(err) : status;
}

static void gpu_leave(void)
{
    if (--gpu.users == 0) device_stop();
}

static void cuda_close(backend_device *on)
{
    if (!on) return;
    scratch_release(cuda_of(on));
    free(on);
    gpu_leave();
}

static uint16_t planes_of(const backend *b)
{
    return strcmp(b->compute, "f32") == 0 ? 0 : strcmp(b->compute, "bf16") == 0 ? 1 : 2;
}

static kvb_status cuda_open(backend_device **out, const backend *b, const backend_limits *limits, kvb_error *err)
{
    *out = NULL;
    kvb_status status = gpu_join(err);
    cuda_device *on = status == KVB_OK ? (cuda_device *)calloc(1, sizeof *on) : NULL;
    if (!on) {
        gpu_leave();
        return status == KVB_OK ? kvb_fail(err, KVB_MEMORY, "backend cuda: no memory") : status;
    }
    on->base.b = b;
    on->planes = planes_of(b);
    if (limits && limits->shape.head_dim > MAX_HEAD_DIM) {
        cuda_close(&on->base);
        return kvb_fail(err, KVB_UNSUPPORTED, "backend cuda: heads of %u, at most %u", limits->shape.head_dim,
                        MAX_HEAD_DIM);
    }
    if (limits && !scratch_take(on, limits)) {
        status = gpu_works()
                     ? kvb_fail(err, KVB_MEMORY, "backend cuda: no memory for its scratch at %u tokens", limits->tokens)
                     : kvb_fail(err, gpu.failed, "%s", gpu.error.message);
        cuda_close(&on->base);
        return status;
    }
    *out = &on->base;
    return KVB_OK;
}

static void cuda_sample(backend_device *on, int32_t *ids, dev logits, uint32_t n, uint32_t vocabulary, const sampler *s,
                        const draw_key *keys)
{
    for (uint32_t at = 0; at < n; at += SAMPLE_ROWS) {
        uint32_t count = n - at < SAMPLE_ROWS ? n - at : SAMPLE_ROWS;
        int32_t *drawn = (int32_t *)scratch_of(cuda_of(on), SCRATCH_SUMS, count * sizeof *drawn);
        const draw_key *taken = (const draw_key *)gpu_take(keys + at, count * sizeof *keys);
        if (drawn && gpu_works()) {
            LAUNCH("sample", sample_kernel, count, SAMPLER_PARTS, drawn, logits.address + (size_t)at * vocabulary,
                   vocabulary, *s, sampler_scale(s), taken);
            gpu_note(cudaMemcpyAsync(ids + at, drawn, count * sizeof *ids, cudaMemcpyDeviceToHost, gpu.stream),
                     "download");
            gpu_note(cudaStreamSynchronize(gpu.stream), "download, or a kernel before it");
        }
        for (uint32_t i = 0; (!drawn || !gpu_works()) && i < count; i++) ids[at + i] = -1;
    }
}

#define CUDA_BACKEND(COMPUTE, SUMMARY)                                                              \
    {                                                                                               \
        .name = "cuda", .compute = COMPUTE, .summary = SUMMARY, .context_rows = BACKEND_CHUNK_ROWS, \
        .sums_importance = false, .own_memory = true, BACKEND_OPERATIONS(cuda, cuda, host),         \
    }

extern "C" const backend backend_cuda =
    CUDA_BACKEND("f32", "cuBLAS and kernels on one NVIDIA GPU (compute capability 8.0 and later), float32");
extern "C" const backend backend_cuda_bf16x3 =
    CUDA_BACKEND("bf16x3", "as cuda, products of operands in two bfloat16 parts");
extern "C" const backend backend_cuda_bf16 = CUDA_BACKEND("bf16", "as cuda, products of operands rounded to bfloat16");
