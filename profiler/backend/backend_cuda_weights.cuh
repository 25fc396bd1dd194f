// Weights: on the device while they fit. When something else needs the memory, the last ones move to pinned host memory
// and are streamed: a ring on the device holds the most recent ones, and while one is used the one that followed it
// last time is already being copied. The prefill goes layer by layer, so a ring of one layer reads each weight once.
#pragma once
#include "profiler/backend/backend_cuda_device.cuh"
#include "profiler/backend/backend_cuda_rows.cuh"

// What a dev_matrix points to. f32: values [out, in]. bf16: [out, in] of 16 bits. bf16x3: two of these, the second what
// the first lost.
struct weight {
    void *memory; // device, or pinned host
    size_t bytes, elements;
    uint32_t out, in;
    bool on_host;
    uint16_t planes; // 0: f32; 1: bf16; 2: bf16x3
    // While on the host:
    char *staged;             // its place in the ring, or NULL
    weight *follower;         // what was copied after it last time
    cudaEvent_t copied, used; // its copy is done; its last reader is done
    // All weights, the newest first; those in the ring, the oldest first.
    weight *older, *newer, *ring_next;
};

static struct {
    weight *newest;
    weight *oldest_staged, *last_staged;
    char *ring;
    size_t ring_bytes, at;      // at: where the next one goes
    size_t host_bytes, largest; // of the weights on the host
} store;

static void ring_drop_oldest(void)
{
    weight *w = store.oldest_staged;
    w->staged = NULL;
    store.oldest_staged = w->ring_next;
    if (!store.oldest_staged) store.last_staged = NULL;
    w->ring_next = NULL;
}

static void ring_release(void)
{
    if (store.ring) {
        gpu_note(cudaStreamSynchronize(gpu.copies), "waiting for the device");
        gpu_note(cudaStreamSynchronize(gpu.stream), "waiting for the device");
    }
    while (store.oldest_staged) ring_drop_oldest();
    gpu_free(store.ring);
    store.ring = NULL;
    store.ring_bytes = store.at = 0;
}

static bool overlaps(const weight *w, const char *from, size_t bytes)
{
    return w->staged < from + bytes && from < w->staged + w->bytes;
}

// Starts the copy of w into the ring, in the place of the oldest ones. `keep` (NULL: none) must stay: false when it is
// in the way.
static bool ring_load(weight *w, const weight *keep)
{
    size_t at = store.at + w->bytes <= store.ring_bytes ? store.at : 0;
    char *to = store.ring + at;
    if (keep && keep->staged && overlaps(keep, to, w->bytes)) return false;
    // In the order of their age, as they lie: up to the last one that is in the way.
    for (;;) {
        bool in_the_way = false;
        for (weight *s = store.oldest_staged; s; s = s->ring_next) in_the_way |= overlaps(s, to, w->bytes);
        if (!in_the_way) break;
        if (store.oldest_staged == keep) return false;
        gpu_note(cudaStreamWaitEvent(gpu.copies, store.oldest_staged->used, 0), "waiting for a weight's last use");
        ring_drop_oldest();
    }
    gpu_note(cudaMemcpyAsync(to, w->memory, w->bytes, cudaMemcpyHostToDevice, gpu.copies), "streaming a weight");
    gpu_note(cudaEventRecord(w->copied, gpu.copies), "streaming a weight");
    w->staged = to;
    if (store.last_staged) store.last_staged->follower = w, store.last_staged->ring_next = w;
    else store.oldest_staged = w;
    store.last_staged = w;
    store.at = (at + w->bytes + 255) / 256 * 256;
    return true;
}

// The ring: all of what is streamed if there is room, at least twice the largest, so that a copy can overlap a use.
static bool ring_open(void)
{
    while (!store.ring) {
        size_t free_bytes = 0, all_bytes = 0, wanted = store.host_bytes + 256 * 1024, least = 2 * store.largest + 512;
        gpu_note(cudaMemGetInfo(&free_bytes, &all_bytes), "asking for free memory");
        free_bytes -= free_bytes / 8; // what is loaded or opened later needs some
        size_t bytes = wanted < free_bytes ? wanted : free_bytes;
        store.ring_bytes = bytes > least ? bytes : least;
        store.ring = (char *)gpu_memory(store.ring_bytes);
        if (!store.ring) return false;
        // Making room may have sent a larger weight to the host; each must fit in twice.
        if (store.ring_bytes < 2 * store.largest + 512) ring_release();
    }
    return true;
}

// Where kernels find w; call weight_used when they are launched. NULL after a failure.
static const void *weight_get(weight *w)
{
    if (!gpu_works()) return NULL;
    if (!w->on_host) return w->memory;
    if (!store.ring && !ring_open()) {
        gpu_note(cudaErrorMemoryAllocation, "room for streamed weights");
        return NULL;
    }
    if (!w->staged) ring_load(w, NULL);
    gpu_note(cudaStreamWaitEvent(gpu.stream, w->copied, 0), "waiting for a weight");
    return w->staged;
}

static void weight_used(weight *w)
{
    if (!w->on_host || !gpu_works()) return;
    gpu_note(cudaEventRecord(w->used, gpu.stream), "using a weight");
    // Only the newest one looks ahead: in a loop over chunks of rows the others come again before anything new does.
    if (w == store.last_staged && w->follower && w->follower->on_host && !w->follower->staged)
        ring_load(w->follower, w);
}

// Moves the newest weight that is on the device to the host; where there is none, gives the ring back, which opens
// again with what is left. False when there is nothing to move, or no host memory.
static bool weights_give_way(void)
{
    weight *w = store.newest;
    while (w && w->on_host) w = w->older;
    if (!w && !store.ring) return false;
    if (!w) {
        ring_release();
        return gpu_works();
    }
    void *host = NULL;
    if (cudaHostAlloc(&host, w->bytes, cudaHostAllocDefault) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    bool ok =
        gpu_note(cudaStreamSynchronize(gpu.stream), "waiting for the device") &&
        gpu_note(cudaEventCreateWithFlags(&w->copied, cudaEventDisableTiming), "an event") &&
        gpu_note(cudaEventCreateWithFlags(&w->used, cudaEventDisableTiming), "an event") &&
        gpu_note(cudaMemcpyAsync(host, w->memory, w->bytes, cudaMemcpyDeviceToHost, gpu.stream), "moving a weight") &&
        gpu_note(cudaStreamSynchronize(gpu.stream), "moving a weight");
    if (!ok) {
        cudaFreeHost(host);
        return false;
    }
    gpu_free(w->memory);
    w->memory = host;
    w->on_host = true;
    store.host_bytes += w->bytes;
    if (w->bytes > store.largest) store.largest = w->bytes;
    ring_release(); // it may have to be larger now
    return gpu_works();
}

static void weight_release(weight *w)
{
    if (!w) return;
    if (w->on_host) { // the ring is in order of age: all of it goes, it fills again
        gpu_note(cudaStreamSynchronize(gpu.copies), "waiting for the device");
        gpu_note(cudaStreamSynchronize(gpu.stream), "waiting for the device");
        while (store.oldest_staged) ring_drop_oldest();
        cudaEventDestroy(w->copied);
        cudaEventDestroy(w->used);
        cudaFreeHost(w->memory);
        store.host_bytes -= w->bytes;
    } else {
        gpu_free(w->memory);
    }
    for (weight *other = store.newest; other; other = other->older)
        if (other->follower == w) other->follower = NULL;
    if (w->newer) w->newer->older = w->older;
    else store.newest = w->older;
    if (w->older) w->older->newer = w->newer;
    free(w);
    if (!store.newest) { // the last one: nothing is left on the device
        ring_release();
        store.largest = 0;
    }
}

static constexpr size_t UPLOAD_ELEMENTS = 1 << 24; // converted at a time

// Fills w's planes from host values, through float32.
static bool weight_fill(weight *w, const float *values)
{
    if (!w->planes) {
        gpu_note(cudaMemcpyAsync(w->memory, values, w->bytes, cudaMemcpyHostToDevice, gpu.stream),
                 "uploading a weight");
        return gpu_note(cudaStreamSynchronize(gpu.stream), "uploading a weight");
    }
    uint16_t *high = (uint16_t *)w->memory, *low = w->planes > 1 ? high + w->elements : NULL;
    for (size_t at = 0; at < w->elements && gpu_works(); at += UPLOAD_ELEMENTS) {
        size_t n = w->elements - at < UPLOAD_ELEMENTS ? w->elements - at : UPLOAD_ELEMENTS;
        if (!growing_take(&gpu.full, n * sizeof(float))) return false;
        float *full = (float *)gpu.full.memory;
        gpu_note(cudaMemcpyAsync(full, values + at, n * sizeof(float), cudaMemcpyHostToDevice, gpu.stream),
                 "uploading a weight");
        LAUNCH("to_bf16", to_bf16_kernel, blocks_of(n, ROW_THREADS), ROW_THREADS, high + at, low ? low + at : NULL,
               full, n, n);
        gpu_note(cudaStreamSynchronize(gpu.stream), "uploading a weight");
    }
    return gpu_works();
}

// A weight [out, in] in the precision `planes`, or with values NULL not filled; NULL when neither device nor host has
// memory for it.
static weight *weight_new(const float *values, uint32_t out, uint32_t in, uint16_t planes)
{
    weight *w = (weight *)calloc(1, sizeof *w);
    if (!w) return NULL;
    w->out = out;
    w->in = in;
    w->elements = (size_t)out * in;
    w->planes = planes;
    w->bytes = w->elements * (planes ? planes * sizeof(uint16_t) : sizeof(float));
    w->memory = gpu_memory(w->bytes);
    if (w->memory && (!values || weight_fill(w, values))) {
        w->older = store.newest;
        if (store.newest) store.newest->newer = w;
        store.newest = w;
        return w;
    }
    gpu_free(w->memory);
    free(w);
    return NULL;
}
