// The CUDA backend: cuBLAS for products, kernels for the rest; the one file that nvcc sees, with the headers
// backend_cuda_*.cuh.
//
// Everything runs in the order of calls on one stream and no operation waits for the device, except those that bring
// something to the host. Numbers are float32; weights and a product's input are rounded to bf16 where the compute mode
// says so, sums stay float32. A row's numbers do not depend on the other rows of a call, but for products of whole
// chunks of a context: cuBLAS picks its kernel, and with it the order of a sum, by shape.
extern "C" {
#include "profiler/backend_cuda.h"
#include "profiler/backend_host.h"
#include "profiler/sampler_core.h"
}
#include "profiler/backend_cuda_reduce.cuh"
#include "profiler/backend_cuda_tensor.cuh"
#include "profiler/backend_cuda_weights.cuh"

static constexpr uint32_t GROUP_ROWS =
    64; // rows of a product, unless it is a whole chunk: one shape, one kernel, the same bits
static constexpr uint32_t PASS_ROWS = 64;    // decoded rows per pass of attention: bounds its scratch
static constexpr uint32_t STRETCH_MIN = 256; // keys of a stretch of the context at least
static constexpr uint32_t STRETCHES_MAX = 64;
static constexpr uint32_t EXACT_ROWS =
    256; // column sums of a window of so few rows are cheap in float32, whatever the precision
static constexpr uint32_t GATHER_IDS = NOTE_BYTES / 8; // ids per launch

// Found out now, not at the first kernel: the program was built for other devices, or its PTX is newer than the driver.
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

static dev cuda_alloc(backend_device *, size_t n_floats)
{
    dev memory = {NULL};
    if (n_floats > SIZE_MAX / sizeof(float)) return memory;
    size_t bytes = n_floats ? n_floats * sizeof(float) : 16;
    memory.address = (float *)gpu_memory(bytes);
    if (memory.address) gpu_note(cudaMemsetAsync(memory.address, 0, bytes, gpu.stream), "clearing memory");
    return memory;
}

static void cuda_release(backend_device *, dev memory)
{
    gpu_free(memory.address);
}

static void cuda_upload(backend_device *, dev to, const float *from, size_t n)
{
    if (!n || !gpu_works()) return;
    gpu_note(cudaMemcpyAsync(to.address, from, n * sizeof(float), cudaMemcpyHostToDevice, gpu.stream), "upload");
    gpu_note(cudaStreamSynchronize(gpu.stream), "upload"); // `from` is the caller's again
}

static void cuda_download(backend_device *, float *to, dev from, size_t n)
{
    if (n && gpu_works()) {
        gpu_note(cudaMemcpyAsync(to, from.address, n * sizeof(float), cudaMemcpyDeviceToHost, gpu.stream), "download");
        gpu_note(cudaStreamSynchronize(gpu.stream), "download, or a kernel before it");
    }
    if (!gpu_works()) memset(to, 0, n * sizeof(float));
}

static void cuda_copy(backend_device *, dev to, dev from, size_t n)
{
    if (n && gpu_works())
        gpu_note(cudaMemcpyAsync(to.address, from.address, n * sizeof(float), cudaMemcpyDeviceToDevice, gpu.stream),
                 "copy");
}

static void cuda_clear(backend_device *, dev memory, size_t n)
{
    if (n && gpu_works()) gpu_note(cudaMemsetAsync(memory.address, 0, n * sizeof(float), gpu.stream), "clear");
}

static const float *cuda_host_view(backend_device *, dev from)
{
    (void)from;
    return NULL;
}

// float32 rows at `address` where there is no other form or somebody asked for rows; the planes of bf16 at `packed`.
static weight *rows_of(dev_matrix m)
{
    return (weight *)(void *)m.address;
}

static weight *operand_of(dev_matrix m)
{
    return m.packed ? (weight *)m.packed : rows_of(m);
}

static void matrix_free(dev_matrix *w)
{
    weight_release(rows_of(*w));
    weight_release((weight *)w->packed);
    w->address = NULL;
    w->packed = NULL;
}

static dev_matrix matrix_make(weight *rows, weight *packed, uint32_t out, uint32_t in, bool complete)
{
    dev_matrix m = {};
    m.address = (float *)(void *)rows;
    m.packed = packed;
    m.out = out;
    m.in = in;
    if (!complete) matrix_free(&m);
    return m;
}

static void cuda_matrix_release(backend_device *, dev_matrix *w)
{
    matrix_free(w);
}

static dev_matrix cuda_matrix_load(backend_device *on, const stored_matrix *w, unsigned hold)
{
    uint16_t planes = cuda_of(on)->planes;
    bool wants_rows = planes == 0 || hold & HOLD_ROWS;
    float *values = host_matrix_values(w, hold);
    weight *rows = values && wants_rows ? weight_new(values, w->out, w->in, 0) : NULL;
    weight *packed = values && planes ? weight_new(values, w->out, w->in, planes) : NULL;
    free(values);
    return matrix_make(rows, packed, w->out, w->in, (rows || !wants_rows) && (packed || !planes));
}

static uint64_t cuda_matrix_bytes(backend_device *on, const stored_matrix *w, unsigned hold)
{
    uint16_t planes = cuda_of(on)->planes;
    bool has_rows = planes == 0 || hold & HOLD_ROWS;
    return (uint64_t)w->out * w->in * (planes * sizeof(uint16_t) + (has_rows ? sizeof(float) : 0));
}

dev_matrix backend_cuda_random_matrix(backend_device *on, uint32_t out, uint32_t in, float scale, uint64_t seed)
{
    uint16_t planes = cuda_of(on)->planes;
    weight *rows = weight_new(NULL, out, in, 0), *packed = planes && rows ? weight_new(NULL, out, in, planes) : NULL;
    if (rows)
        LAUNCH("random", random_kernel, blocks_of(rows->elements, ROW_THREADS), ROW_THREADS, (float *)rows->memory,
               rows->elements, scale, seed);
    if (packed) {
        uint16_t *high = (uint16_t *)packed->memory;
        LAUNCH("to_bf16", to_bf16_kernel, blocks_of(rows->elements, ROW_THREADS), ROW_THREADS, high,
               planes > 1 ? high + packed->elements : NULL, (const float *)rows->memory, rows->elements,
               rows->elements);
        weight_release(rows); // the planes hold all of it
        rows = NULL;
    }
    return matrix_make(rows, packed, out, in, rows || packed);
}

// Calls `launch` with the number of 64-wide chunks that a head needs, as a constant that kernels are compiled for.
#define FOR_HEAD_CHUNKS(d, LAUNCH_FOR)      \
    do {                                    \
        if ((d) <= 64) LAUNCH_FOR(1);       \
        else if ((d) <= 128) LAUNCH_FOR(2); \
        else if ((d) <= 256) LAUNCH_FOR(4); \
        else LAUNCH_FOR(8);                 \
    } while (0)

// The same for kernels on tensor cores.
#define FOR_MMA_CHUNKS(d, LAUNCH_FOR)       \
    do {                                    \
        if ((d) <= 64) LAUNCH_FOR(1);       \
        else if ((d) <= 128) LAUNCH_FOR(2); \
        else LAUNCH_FOR(4);                 \
    } while (0)

static uint32_t padded_dim(uint32_t d)
{
    return d <= 64 ? 64 : d <= 128 ? 128 : MMA_MAX_DIM;
}

// bf16: rounded keys, then values, for the tensor cores. Attention in f32 and bf16x3 reads keys and values as they are:
// a score enters an exponential, for which two parts of bf16 are not enough.
static size_t cuda_packed_floats(backend_device *on, uint32_t n_tokens, attention_shape s)
{
    bool packs = cuda_of(on)->planes == 1 && s.head_dim <= MMA_MAX_DIM;
    return packs ? (size_t)s.n_kv_heads * n_tokens * padded_dim(s.head_dim) : 0;
}

static void cuda_pack_prefix(backend_device *on, const prefix_kv *kv, attention_shape s)
{
    size_t lines = (size_t)s.n_kv_heads * kv->n_tokens;
    uint32_t padded = padded_dim(s.head_dim);
    if (lines && cuda_packed_floats(on, kv->n_tokens, s))
        LAUNCH("pack_prefix", pack_kernel, blocks_of(lines * padded, ROW_THREADS), ROW_THREADS,
               (uint32_t *)kv->packed.address, kv->k.address, kv->v.address, lines, s.head_dim, padded);
}

static packed_kv packed_of(const prefix_kv *kv, attention_shape s)
{
    const uint4 *k = (const uint4 *)kv->packed.address;
    return {k, k + (size_t)s.n_kv_heads * kv->n_tokens * padded_dim(s.head_dim) / 8};
}

static uint32_t stretch_of(uint32_t n_tokens)
{
    uint32_t each = (n_tokens + STRETCHES_MAX - 1) / STRETCHES_MAX;
    each = (each + TILE - 1) / TILE * TILE;
    return each < STRETCH_MIN ? STRETCH_MIN : each;
}

// Scratch of a pass: top, sum and values of every part of PASS_ROWS rows.
static size_t pass_lines_of(const attention_shape *s, uint32_t n_tokens)
{
    uint32_t stretch = stretch_of(n_tokens);
    return (size_t)((n_tokens + stretch - 1) / stretch + 1) * PASS_ROWS * s->n_heads;
}

static size_t mean_scratch(uint32_t heads, uint32_t d)
{
    return (size_t)heads * MEAN_SPANS * d * sizeof(double);
}

// Partial sums of value_weights or of moments.
static size_t sums_scratch(const backend_limits *limits)
{
    size_t weights = ((size_t)limits->shape.n_heads * limits->tokens / SUM_SPAN + 2) * sizeof(double),
           means = mean_scratch(limits->shape.n_heads, limits->shape.head_dim);
    return weights > means ? weights : means;
}

// No less than cuda_reserve takes: inputs rounded to two planes, padded rows of the widest matrix, parts of attention.
static uint64_t cuda_scratch_bytes(backend_device *, const backend_limits *limits)
{
    const attention_shape *s = &limits->shape;
    uint64_t rows = limits->rows > GROUP_ROWS ? limits->rows : GROUP_ROWS;
    return (uint64_t)(STRETCHES_MAX + 1) * PASS_ROWS * s->n_heads * (s->head_dim + 2) * sizeof(float) +
           2 * (uint64_t)GROUP_ROWS * limits->matrix_dim * sizeof(float) +
           2 * rows * limits->matrix_dim * sizeof(uint16_t) + sums_scratch(limits);
}

// All but an eighth: weights make room for what a run needs beside them (backend_cuda_weights.cuh).
static uint64_t cuda_free_bytes(backend_device *)
{
    size_t free_now = 0, all = 0;
    if (cudaMemGetInfo(&free_now, &all) != cudaSuccess) return 0;
    return all - all / 8;
}

static bool take_scratch(cuda_device *on, const backend_limits *limits)
{
    const attention_shape *s = &limits->shape;
    scratch_release(&gpu.full); // the weights are there
    if (s->head_dim > MAX_HEAD_DIM) return false;
    size_t lines = (size_t)(STRETCHES_MAX + 1) * PASS_ROWS * s->n_heads;
    size_t padded = 0, rounded = 0;
    for (const weight *w = store.newest; w; w = w->older) {
        size_t pads = (size_t)GROUP_ROWS * ((size_t)w->out + w->in) * sizeof(float);
        size_t inputs =
            (size_t)w->planes * (limits->rows > GROUP_ROWS ? limits->rows : GROUP_ROWS) * w->in * sizeof(uint16_t);
        padded = pads > padded ? pads : padded;
        rounded = inputs > rounded ? inputs : rounded;
    }
    return scratch_try(&on->parts, lines * (s->head_dim + 2) * sizeof(float)) && scratch_try(&on->padded, padded) &&
           scratch_try(&on->rounded, rounded) && scratch_try(&on->sums, sums_scratch(limits)) &&
           (!store.host_bytes || store.ring || ring_open());
}

// Weights that are streamed get all the memory that is left: the ring opens again with what there is then.
static void give_scratch(cuda_device *on)
{
    scratch *const all[] = {&on->parts, &on->rounded, &on->padded, &on->sums, &gpu.full};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) scratch_release(all[i]);
    ring_release();
}

// The first one starts the device, the last one stops it.
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
    give_scratch(cuda_of(on));
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
    if (limits && !take_scratch(on, limits)) {
        status = gpu_works()
                     ? kvb_fail(err, KVB_MEMORY, "backend cuda: no memory for its scratch at %u tokens", limits->tokens)
                     : kvb_fail(err, gpu.failed, "%s", gpu.error.message);
        cuda_close(&on->base);
        return status;
    }
    *out = &on->base;
    return KVB_OK;
}

// --- rows ---

static void cuda_gather(backend_device *, dev y, dev_matrix table, const int32_t *ids, uint32_t n)
{
    weight *w = rows_of(table);
    for (uint32_t at = 0; at < n; at += GATHER_IDS) {
        uint32_t count = n - at < GATHER_IDS ? n - at : GATHER_IDS;
        const int32_t *taken = (const int32_t *)gpu_take(ids + at, count * sizeof *ids);
        // A few rows: read where the table is, also out of the host's pinned memory.
        LAUNCH("gather", gather_kernel, count, ROW_THREADS, y.address + (size_t)at * table.in, (const float *)w->memory,
               taken, table.in);
    }
}

static void cuda_rms_norm(backend_device *, dev y, dev x, dev weight_vector, uint32_t n, uint32_t width, float eps)
{
    if (n) LAUNCH("rms_norm", rms_norm_kernel, n, ROW_THREADS, y.address, x.address, weight_vector.address, width, eps);
}

static void cuda_layer_norm(backend_device *, dev y, dev x, dev weights, uint32_t n, uint32_t width, uint32_t n_weights,
                            float eps)
{
    if (n)
        LAUNCH("layer_norm", layer_norm_kernel, n, ROW_THREADS, y.address, x.address, weights.address, width, n_weights,
               eps);
}

static void cuda_glu(backend_device *, dev gate, dev up, activation act, size_t n_floats)
{
    if (n_floats)
        LAUNCH("glu", glu_kernel, blocks_of(n_floats, ROW_THREADS), ROW_THREADS, gate.address, up.address, act,
               n_floats);
}

static void cuda_softcap(backend_device *, dev y, float cap, size_t n_floats)
{
    if (n_floats)
        LAUNCH("softcap", softcap_kernel, blocks_of(n_floats, ROW_THREADS), ROW_THREADS, y.address, cap, n_floats);
}

static void cuda_clip(backend_device *, dev y, float most, size_t n_floats)
{
    if (n_floats) LAUNCH("clip", clip_kernel, blocks_of(n_floats, ROW_THREADS), ROW_THREADS, y.address, most, n_floats);
}

static void cuda_take_rows(backend_device *, dev y, dev x, const uint32_t *rows, uint32_t n, uint32_t width)
{
    size_t floats = (size_t)n * width;
    const uint32_t *taken = n ? (const uint32_t *)gpu_take(rows, n * sizeof *rows) : NULL;
    if (floats)
        LAUNCH("take_rows", take_rows_kernel, blocks_of(floats, ROW_THREADS), ROW_THREADS, y.address, x.address, taken,
               floats, width);
}

static void cuda_add_rows(backend_device *, dev y, dev x, const uint32_t *rows, const float *weights, uint32_t n,
                          uint32_t width)
{
    size_t floats = (size_t)n * width;
    const uint32_t *taken = n ? (const uint32_t *)gpu_take(rows, n * sizeof *rows) : NULL;
    const float *factors = n ? (const float *)gpu_take(weights, n * sizeof *weights) : NULL;
    if (floats)
        LAUNCH("add_rows", add_rows_kernel, blocks_of(floats, ROW_THREADS), ROW_THREADS, y.address, x.address, taken,
               factors, floats, width);
}

static void cuda_scale(backend_device *, dev y, float by, size_t n_floats)
{
    if (n_floats)
        LAUNCH("scale", multiply_kernel, blocks_of(n_floats, ROW_THREADS), ROW_THREADS, y.address, by, n_floats);
}

static void cuda_add_row(backend_device *, dev y, dev row, uint32_t n, uint32_t width)
{
    size_t floats = (size_t)n * width;
    if (floats)
        LAUNCH("add_row", add_row_kernel, blocks_of(floats, ROW_THREADS), ROW_THREADS, y.address, row.address, floats,
               width);
}

static void cuda_add_scaled(backend_device *, dev y, dev x, float by, size_t n_floats)
{
    if (n_floats)
        LAUNCH("add_scaled", add_scaled_kernel, blocks_of(n_floats, ROW_THREADS), ROW_THREADS, y.address, x.address, by,
               n_floats);
}

static void cuda_rope(backend_device *, dev y, dev x, dev cos_sin, const uint32_t *positions, uint32_t n,
                      uint32_t heads, uint32_t d, uint32_t rope_dim)
{
    size_t threads = (size_t)n * heads * (rope_dim / 2 + (d - rope_dim));
    const uint32_t *taken = n ? (const uint32_t *)gpu_take(positions, n * sizeof *positions) : NULL;
    if (threads)
        LAUNCH("rope", rope_kernel, blocks_of(threads, ROW_THREADS), ROW_THREADS, y.address, x.address, cos_sin.address,
               taken, n, heads, d, rope_dim);
}

static void cuda_store_prefix(backend_device *, dev cache, uint32_t n_tokens, uint32_t first, dev values, uint32_t n,
                              uint32_t n_kv_heads, uint32_t d)
{
    if (n)
        LAUNCH("store_prefix", store_prefix_kernel, blocks_of((size_t)n * n_kv_heads * d, ROW_THREADS), ROW_THREADS,
               cache.address, n_tokens, first, values.address, n, n_kv_heads, d);
}

static const decode_row *take_rows(const decode_row *rows, uint32_t n)
{
    return (const decode_row *)gpu_take(rows, n * sizeof *rows);
}

static void cuda_store_tail(backend_device *, dev cache, uint32_t capacity, const decode_row *rows, dev values,
                            uint32_t n, uint32_t n_kv_heads, uint32_t d)
{
    if (!n) return;
    const decode_row *taken = take_rows(rows, n);
    LAUNCH("store_tail", store_tail_kernel, blocks_of((size_t)n * n_kv_heads * d, ROW_THREADS), ROW_THREADS,
           cache.address, capacity, taken, values.address, n, n_kv_heads, d);
}

// --- products ---

// y [n,out] = x [n,in] w^T + beta y, row-major; to cuBLAS, whose matrices are column-major, it is y^T = w x^T.
static void product(float *y, const void *x, const void *w, int type, dev_matrix m, uint32_t n, float beta)
{
    const float one = 1.0f;
    if (!gpu_works()) return;
    int code = gpu.blas.gemm(gpu.blas.handle, BLAS_T, BLAS_N, (int)m.out, (int)n, (int)m.in, &one, w, type, (int)m.in,
                             x, type, (int)m.in, &beta, y, BLAS_F32, (int)m.out, BLAS_COMPUTE_F32, BLAS_GEMM_DEFAULT);
    if (code == 0) return;
    gpu.failed = kvb_fail(&gpu.error, code == 3 ? KVB_MEMORY : KVB_UNSUPPORTED,
                          "backend cuda: cuBLAS failed with status %d at a product of %u rows, %u in, %u out", code, n,
                          m.in, m.out);
}

// The input in the weight's precision, padded with rows of zeros to n_padded: one or two planes of bf16.
static const uint16_t *round_input(cuda_device *on, const float *x, uint32_t n, uint32_t n_padded, const dev_matrix *m,
                                   uint16_t planes)
{
    size_t elements = (size_t)n * m->in, padded = (size_t)n_padded * m->in;
    uint16_t *high = (uint16_t *)scratch_get(on, &on->rounded, planes * padded * sizeof *high);
    if (high)
        LAUNCH("to_bf16", to_bf16_kernel, blocks_of(padded, ROW_THREADS), ROW_THREADS, high,
               planes > 1 ? high + padded : NULL, x, elements, padded);
    return high;
}

// n rows of x times the weight, n_padded of them real memory in y.
static void multiply(cuda_device *on, float *y, const float *x, dev_matrix m, uint32_t n, uint32_t n_padded,
                     bool accumulate)
{
    weight *w = operand_of(m);
    size_t padded = (size_t)n_padded * m.in;
    const uint16_t *high = w->planes ? round_input(on, x, n, n_padded, &m, w->planes) : NULL;
    const void *values = weight_get(w); // after all scratch is there: to make room, weights move
    const uint16_t *low = (const uint16_t *)values + w->elements;
    float beta = accumulate ? 1.0f : 0.0f;
    if (!w->planes) {
        product(y, x, values, BLAS_F32, m, n_padded, beta);
    } else {
        product(y, high, values, BLAS_BF16, m, n_padded, beta);
        if (w->planes > 1) { // x w = (xh + xl) (wh + wl) without xl wl, which is below the rounding of float32 sums
            product(y, high, low, BLAS_BF16, m, n_padded, 1.0f);
            product(y, high + padded, values, BLAS_BF16, m, n_padded, 1.0f);
        }
    }
    weight_used(w);
}

// Fewer than GROUP_ROWS rows, as GROUP_ROWS of them: the others are zeros.
static void multiply_few(cuda_device *on, float *y, float *x, dev_matrix w, uint32_t n, bool accumulate)
{
    size_t in = (size_t)n * w.in, out = (size_t)n * w.out, all_in = (size_t)GROUP_ROWS * w.in,
           all_out = (size_t)GROUP_ROWS * w.out;
    float *padded_y = (float *)scratch_get(on, &on->padded, (all_out + all_in) * sizeof(float));
    if (!padded_y) return;
    dev from = {x}, to = {padded_y};
    if (!operand_of(w)->planes) { // bf16 pads when it rounds
        from.address = padded_y + all_out;
        cuda_copy(&on->base, from, {x}, in);
        cuda_clear(&on->base, dev_at(from, in), all_in - in);
    }
    if (accumulate) {
        cuda_copy(&on->base, to, {y}, out);
        cuda_clear(&on->base, dev_at(to, out), all_out - out);
    }
    multiply(on, padded_y, from.address, w, n, GROUP_ROWS, accumulate);
    cuda_copy(&on->base, {y}, to, out);
}

static void cuda_matmul(backend_device *on, dev y, dev x, dev_matrix w, uint32_t n, bool accumulate)
{
    if (n >= BACKEND_CHUNK_ROWS) {
        multiply(cuda_of(on), y.address, x.address, w, n, n, accumulate);
        return;
    }
    for (uint32_t at = 0; at < n; at += GROUP_ROWS) {
        float *to = y.address + (size_t)at * w.out, *from = x.address + (size_t)at * w.in;
        if (n - at < GROUP_ROWS) multiply_few(cuda_of(on), to, from, w, n - at, accumulate);
        else multiply(cuda_of(on), to, from, w, GROUP_ROWS, GROUP_ROWS, accumulate);
    }
}

static void cuda_project(backend_device *on, const projection *to, uint32_t count, dev x, uint32_t n)
{
    for (uint32_t i = 0; i < count; i++) cuda_matmul(on, to[i].y, x, to[i].w, n, false);
}

// --- attention ---

static void cuda_attend_prefix(backend_device *, dev o, dev q, const prefix_kv *kv, uint32_t first, uint32_t n,
                               attention_shape s)
{
    if (!n) return;
#define ATTEND_PREFIX_MMA(chunks)                                                                                 \
    LAUNCH_SHARED("attend_prefix", (attend_prefix_mma_kernel<chunks, MMA_TILES<chunks>>),                         \
                  dim3(blocks_of(n, 64 * MMA_TILES<chunks>), s.n_heads), MMA_THREADS,                             \
                  sizeof(mma_keys_and_values<chunks, MMA_TILES<chunks>>), o.address, q.address, packed_of(kv, s), \
                  kv->n_tokens, first, n, s)
    if (kv->packed.address) {
        FOR_MMA_CHUNKS(s.head_dim, ATTEND_PREFIX_MMA);
        return;
    }
#undef ATTEND_PREFIX_MMA
    dim3 grid(blocks_of(n, TILE), s.n_heads);
#define ATTEND_PREFIX(chunks)                                                                                      \
    LAUNCH("attend_prefix", attend_prefix_kernel<chunks>, grid, TILE_THREADS, o.address, q.address, kv->k.address, \
           kv->v.address, kv->n_tokens, first, n, s)
    FOR_HEAD_CHUNKS(s.head_dim, ATTEND_PREFIX);
#undef ATTEND_PREFIX
}

// Every row and head against every stretch of the context.
static void attend_stretches(const row_pass &pass, const packed_kv *packed)
{
    uint32_t G = pass.shape.n_kv_heads;
    dim3 grid(blocks_of((size_t)pass.n * (pass.shape.n_heads / G), TILE), G, pass.n_parts - 1);
#define ATTEND_STRETCH(chunks) LAUNCH("attend_stretch", attend_stretch_kernel<chunks>, grid, TILE_THREADS, pass)
#define ATTEND_STRETCH_MMA(chunks)                                                        \
    LAUNCH_SHARED("attend_stretch", attend_stretch_mma_kernel<chunks>, grid, MMA_THREADS, \
                  sizeof(mma_keys_and_values<chunks, 1>), pass, *packed)
    if (packed) FOR_MMA_CHUNKS(pass.shape.head_dim, ATTEND_STRETCH_MMA);
    else FOR_HEAD_CHUNKS(pass.shape.head_dim, ATTEND_STRETCH);
#undef ATTEND_STRETCH
#undef ATTEND_STRETCH_MMA
}

static void observe_rows(const row_pass &pass, const packed_kv *packed, const oracle_view *oracle)
{
    uint32_t G = pass.shape.n_kv_heads;
    dim3 grid(blocks_of(pass.n_tokens, packed ? IMPORTANCE_KEYS : TILE), G,
              blocks_of((size_t)pass.n * (pass.shape.n_heads / G), TILE));
#define IMPORTANCE_MMA(chunks)                                                                                       \
    LAUNCH_SHARED("importance", importance_mma_kernel<chunks>, grid, MMA_THREADS, sizeof(mma_keys<chunks, 1>), pass, \
                  *packed, oracle->best.address, oracle->best_stride, oracle->weights.address)
    if (packed) FOR_MMA_CHUNKS(pass.shape.head_dim, IMPORTANCE_MMA);
    else
        LAUNCH("importance", importance_kernel, grid, TILE_THREADS, pass, oracle->best.address, oracle->best_stride,
               oracle->weights.address);
#undef IMPORTANCE_MMA
}

// At most PASS_ROWS rows. packed: NULL where attention reads keys and values as they are.
static void attend_pass(cuda_device *on, float *o, row_pass pass, const packed_kv *packed, const oracle_view *oracle)
{
    size_t heads = (size_t)pass.n * pass.shape.n_heads, all_lines = pass_lines_of(&pass.shape, pass.n_tokens);
    float *memory = (float *)scratch_get(on, &on->parts, all_lines * (pass.shape.head_dim + 2) * sizeof(float));
    if (!memory) return;
    pass.stretch = stretch_of(pass.n_tokens);
    pass.n_parts = blocks_of(pass.n_tokens, pass.stretch) + 1;
    pass.top = memory;
    pass.sum = memory + all_lines;
    pass.values = memory + 2 * all_lines;
    attend_stretches(pass, packed);
    LAUNCH("attend_tail", attend_tail_kernel, blocks_of(heads, LINE_WARPS), LINE_WARPS * WARP, pass);
    LAUNCH("merge_rows", merge_rows_kernel, blocks_of(heads, LINE_WARPS), LINE_WARPS * WARP, o, pass);
    if (oracle->weights.address) observe_rows(pass, packed, oracle);
}

static void cuda_attend_rows(backend_device *on, dev o, dev q, const prefix_kv *kv, const tail_kv *tails,
                             const decode_row *rows, uint32_t n, attention_shape s, const oracle_view *oracle)
{
    if (!n) return;
    const decode_row *taken = take_rows(rows, n);
    packed_kv packed = packed_of(kv, s);
    for (uint32_t at = 0; at < n; at += PASS_ROWS) {
        row_pass pass = {};
        size_t offset = (size_t)at * s.n_heads * s.head_dim;
        pass.q = q.address + offset;
        pass.k = kv->k.address;
        pass.v = kv->v.address;
        pass.tail_k = tails->k.address;
        pass.tail_v = tails->v.address;
        pass.rows = taken ? taken + at : NULL;
        pass.n = n - at < PASS_ROWS ? n - at : PASS_ROWS;
        pass.n_tokens = kv->n_tokens;
        pass.capacity = tails->capacity;
        pass.shape = s;
        attend_pass(cuda_of(on), o.address + offset, pass, kv->packed.address ? &packed : NULL, oracle);
    }
}

static void cuda_value_weights(backend_device *on, dev w, const prefix_kv *kv, dev root, dev centre, attention_shape s)
{
    (void)centre; // {NULL}: this backend does not sum importance
    size_t n = (size_t)s.n_heads * kv->n_tokens;
    unsigned spans = blocks_of(n, SUM_SPAN);
    double *partial = (double *)scratch_get(cuda_of(on), &cuda_of(on)->sums, ((size_t)spans + 1) * sizeof(double));
    if (!partial) return;
    float *factor = (float *)(partial + spans);
    dim3 grid(blocks_of(kv->n_tokens, TILE), s.n_heads);
    LAUNCH("value_norms", value_norms_kernel, grid, TILE_THREADS, w.address, kv->v.address, root.address, kv->n_tokens,
           s);
    LAUNCH("sum", sum_kernel, spans, ROW_THREADS, partial, w.address, n);
    LAUNCH("sum", inverse_kernel, 1, ROW_THREADS, factor, partial, spans);
    LAUNCH("scale", scale_kernel, blocks_of(n, ROW_THREADS), ROW_THREADS, w.address, n, factor);
}

static constexpr uint32_t SAMPLE_ROWS = 4096; // per launch

static void cuda_sample(backend_device *on, int32_t *ids, dev logits, uint32_t n, uint32_t vocabulary, const sampler *s,
                        const draw_key *keys)
{
    for (uint32_t at = 0; at < n; at += SAMPLE_ROWS) {
        uint32_t count = n - at < SAMPLE_ROWS ? n - at : SAMPLE_ROWS;
        int32_t *drawn = (int32_t *)scratch_get(cuda_of(on), &cuda_of(on)->sums, count * sizeof *drawn);
        const draw_key *taken = (const draw_key *)gpu_take(keys + at, count * sizeof *keys);
        if (drawn)
            LAUNCH("sample", sample_kernel, count, SAMPLER_PARTS, drawn, logits.address + (size_t)at * vocabulary,
                   vocabulary, *s, sampler_scale(s), taken);
        if (gpu_works()) {
            gpu_note(cudaMemcpyAsync(ids + at, drawn, count * sizeof *ids, cudaMemcpyDeviceToHost, gpu.stream),
                     "download");
            gpu_note(cudaStreamSynchronize(gpu.stream), "download, or a kernel before it");
        }
        for (uint32_t i = 0; !gpu_works() && i < count; i++) ids[at + i] = -1;
    }
}

static void cuda_column_sums(backend_device *, dev sums, dev row_log, dev q, const prefix_kv *kv, uint32_t first,
                             attention_shape s)
{
    uint32_t T = kv->n_tokens;
    dim3 rows(blocks_of(T - first, TILE), s.n_heads);
#define COLUMN_SUMS_MMA(chunks)                                                                                       \
    do {                                                                                                              \
        LAUNCH_SHARED("row_log", row_log_mma_kernel<chunks>, rows, MMA_THREADS, sizeof(mma_keys<chunks, 1>),          \
                      row_log.address, q.address, packed_of(kv, s), T, first, s);                                     \
        LAUNCH_SHARED("column_sums", column_sums_mma_kernel<chunks>, dim3(blocks_of(T, MMA_KEYS<chunks>), s.n_heads), \
                      MMA_THREADS, sizeof(mma_keys<chunks, 1>), sums.address, row_log.address, q.address,             \
                      packed_of(kv, s), T, first, s);                                                                 \
    } while (0)
    if (kv->packed.address && T - first > EXACT_ROWS) {
        FOR_MMA_CHUNKS(s.head_dim, COLUMN_SUMS_MMA);
        return;
    }
#undef COLUMN_SUMS_MMA
    LAUNCH("row_log", row_log_kernel, rows, TILE_THREADS, row_log.address, q.address, kv->k.address, T, first, s);
    LAUNCH("column_sums", column_sums_kernel, dim3(blocks_of(T, TILE), s.n_heads), TILE_THREADS, sums.address,
           row_log.address, q.address, kv->k.address, T, first, s);
}

static void cuda_output_norms(backend_device *, dev norms, const prefix_kv *kv, dev_matrix wo, attention_shape s)
{
    weight *w = rows_of(wo);
    const float *rows = (const float *)weight_get(w);
    dim3 grid(blocks_of(kv->n_tokens, TILE), s.n_heads);
    LAUNCH("output_norms", output_norms_kernel, grid, TILE_THREADS, norms.address, kv->v.address, rows, wo.out,
           kv->n_tokens, s);
    weight_used(w);
}

// --- reductions for scorers ---

static void cuda_norms(backend_device *, dev out, dev x, size_t n, uint32_t width)
{
    if (n)
        LAUNCH("norms", norms_kernel, blocks_of(n, ROW_THREADS / WARP), ROW_THREADS, out.address, x.address, n, width);
}

static void cuda_moments(backend_device *on, dev mean, dev covariance, dev x, dev norms, uint32_t n, uint32_t heads,
                         uint32_t d, bool by_head)
{
    head_rows rows = {x.address, by_head ? (size_t)n * d : d, by_head ? d : (size_t)heads * d, n, d};
    uint32_t tiles = blocks_of(d, TILE);
    double *partial = (double *)scratch_get(cuda_of(on), &cuda_of(on)->sums, mean_scratch(heads, d));
    if (!partial) return;
    LAUNCH("mean", mean_spans_kernel, dim3(MEAN_SPANS, heads), ROW_THREADS, partial, rows, norms.address);
    LAUNCH("mean", mean_kernel, heads, ROW_THREADS, mean.address, partial, n, d);
    if (covariance.address)
        LAUNCH("covariance", covariance_kernel, dim3(tiles * tiles, heads), TILE_THREADS, covariance.address,
               mean.address, rows);
}

static void cuda_quadratic(backend_device *, dev out, const prefix_kv *kv, dev linear, dev square, attention_shape s)
{
    LAUNCH("quadratic", quadratic_kernel, dim3(blocks_of(kv->n_tokens, TILE), s.n_heads), TILE_THREADS, out.address,
           kv->k.address, linear.address, square.address, kv->n_tokens, s);
}

static void cuda_spreads(backend_device *, dev out, dev z, uint32_t n_tokens, uint32_t n_kv_heads, uint32_t d,
                         partition_row row)
{
    if (row.count)
        LAUNCH("spreads", spreads_kernel, dim3(row.count, n_kv_heads), ROW_THREADS, out.address, z.address, n_tokens, d,
               row);
}

#define CUDA_BACKEND(COMPUTE, SUMMARY)                                                                                 \
    {                                                                                                                  \
        .name = "cuda", .compute = COMPUTE, .summary = SUMMARY, .context_rows = BACKEND_CHUNK_ROWS, .open = cuda_open, \
        .sums_importance = false,                                                                                      \
        .close = cuda_close, .check = cuda_check, .alloc = cuda_alloc, .release = cuda_release, .upload = cuda_upload, \
        .download = cuda_download, .copy = cuda_copy, .clear = cuda_clear, .host_view = cuda_host_view,                \
        .matrix_load = cuda_matrix_load, .matrix_bytes = cuda_matrix_bytes, .matrix_release = cuda_matrix_release,     \
        .scratch_bytes = cuda_scratch_bytes,                                                                           \
        .free_bytes = cuda_free_bytes, .gather = cuda_gather, .rms_norm = cuda_rms_norm, .matmul = cuda_matmul,        \
        .project = cuda_project, .layer_norm = cuda_layer_norm, .glu = cuda_glu, .softcap = cuda_softcap,              \
        .clip = cuda_clip, .scale = cuda_scale, .add_row = cuda_add_row, .add_scaled = cuda_add_scaled,                \
        .take_rows = cuda_take_rows, .add_rows = cuda_add_rows, .rope = cuda_rope, .store_prefix = cuda_store_prefix,  \
        .store_tail = cuda_store_tail, .packed_floats = cuda_packed_floats, .pack_prefix = cuda_pack_prefix,           \
        .attend_prefix = cuda_attend_prefix, .attend_rows = cuda_attend_rows, .value_weights = cuda_value_weights,     \
        .sample = cuda_sample, .column_sums = cuda_column_sums, .output_norms = cuda_output_norms,                     \
        .norms = cuda_norms, .moments = cuda_moments, .quadratic = cuda_quadratic, .spreads = cuda_spreads,            \
    }

extern "C" const backend backend_cuda =
    CUDA_BACKEND("f32", "cuBLAS and kernels on one NVIDIA GPU (compute capability 8.0 and later), float32");
extern "C" const backend backend_cuda_bf16x3 =
    CUDA_BACKEND("bf16x3", "as cuda, products of operands in two bfloat16 parts");
extern "C" const backend backend_cuda_bf16 = CUDA_BACKEND("bf16", "as cuda, products of operands rounded to bfloat16");
