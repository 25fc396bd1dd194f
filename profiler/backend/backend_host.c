#include "profiler/backend/backend_host.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

kvb_status host_check(backend_device *on, kvb_error *err)
{
    return on->failed == KVB_OK ? KVB_OK : kvb_fail(err, on->failed, "%s", on->error.message);
}

uint64_t host_free_bytes(backend_device *on)
{
    return 0;
}

// Runs on all threads, because the first write is what makes the system allocate and clear the pages.
static void clear(float *p, size_t bytes)
{
    enum { PIECE = 4 << 20 };
#pragma omp parallel for schedule(dynamic, 1) if (bytes > PIECE)
    for (size_t at = 0; at < bytes; at += PIECE) memset((char *)p + at, 0, bytes - at < PIECE ? bytes - at : PIECE);
}

// Large blocks ask for large pages, which save a pass over weights or keys most of its page walks.
float *host_memory(size_t n_floats)
{
    enum { LINE = 64, LARGE_PAGE = 2 << 20 };
    size_t align = n_floats * sizeof(float) >= LARGE_PAGE ? LARGE_PAGE : LINE,
           bytes = (n_floats * sizeof(float) + LINE - 1) / LINE * LINE;
    float *p = NULL;
    if (posix_memalign((void **)&p, align, bytes ? bytes : LINE) != 0) return NULL;
    if (align == LARGE_PAGE)
        madvise(p, bytes / LARGE_PAGE * LARGE_PAGE, MADV_HUGEPAGE); // a hint: failure costs speed only
    clear(p, bytes);
    return p;
}

dev host_alloc(backend_device *on, size_t n_floats)
{
    return (dev){host_memory(n_floats)};
}

void host_release(backend_device *on, dev memory)
{
    free(memory.address);
}

void host_upload(backend_device *on, dev to, const float *from, size_t n)
{
    memcpy(to.address, from, n * sizeof(float));
}

void host_download(backend_device *on, float *to, dev from, size_t n)
{
    memcpy(to, from.address, n * sizeof(float));
}

void host_copy(backend_device *on, dev to, dev from, size_t n)
{
    memcpy(to.address, from.address, n * sizeof(float));
}

void host_clear(backend_device *on, dev memory, size_t n)
{
    memset(memory.address, 0, n * sizeof(float));
}

const float *host_view(backend_device *on, dev from)
{
    return from.address;
}

// The operations below treat every element or row by itself: the number of threads does not change results.
void host_scale(backend_device *on, dev y, float by, size_t n_floats)
{
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n_floats; i++) y.address[i] *= by;
}

void host_add_row(backend_device *on, dev y, dev row, uint32_t n, uint32_t width)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t c = 0; c < width; c++) y.address[(size_t)i * width + c] += row.address[c];
}

void host_take_rows(backend_device *on, dev y, dev x, const uint32_t *rows, uint32_t n, uint32_t width)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        memcpy(y.address + (size_t)i * width, x.address + (size_t)rows[i] * width, width * sizeof(float));
}

void host_store_prefix(backend_device *on, dev cache, uint32_t n_tokens, uint32_t first, dev values, uint32_t n,
                       uint32_t n_kv_heads, uint32_t d)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t g = 0; g < n_kv_heads; g++)
            memcpy(cache.address + ((size_t)g * n_tokens + first + i) * d,
                   values.address + ((size_t)i * n_kv_heads + g) * d, d * sizeof(float));
}

void host_store_tail(backend_device *on, dev cache, uint32_t capacity, const decode_row *rows, dev values, uint32_t n,
                     uint32_t n_kv_heads, uint32_t d)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t g = 0; g < n_kv_heads; g++)
            memcpy(cache.address + (((size_t)rows[i].question * n_kv_heads + g) * capacity + rows[i].tail) * d,
                   values.address + ((size_t)i * n_kv_heads + g) * d, d * sizeof(float));
}

void host_sample(backend_device *on, int32_t *ids, dev logits, uint32_t n, uint32_t vocabulary, const sampler *s,
                 const draw_key *keys)
{
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t i = 0; i < n; i++)
        ids[i] = sampler_draw(s, logits.address + (size_t)i * vocabulary, vocabulary, &keys[i]);
}

float *host_matrix_values(const stored_matrix *w)
{
    float *values = host_memory((size_t)w->out * w->in);
    bool ok = values != NULL;
#pragma omp parallel for schedule(static) reduction(&& : ok)
    for (uint32_t r = 0; r < w->out; r++) ok = ok && stored_rows(w, r, 1, values + (size_t)r * w->in);
    if (ok) return values;
    free(values);
    return NULL;
}

size_t host_packed_floats(backend_device *on, uint32_t n_tokens, attention_shape s)
{
    return 0;
}

void host_pack_prefix(backend_device *on, const prefix_kv *kv, attention_shape s) {}
