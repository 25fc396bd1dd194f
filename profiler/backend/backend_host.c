#include "profiler/backend/backend_host.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

kvb_status host_open(backend_device **out, const backend *b, const backend_limits *limits, kvb_error *err)
{
    *out = need(1, sizeof **out, "devices");
    (*out)->b = b;
    return KVB_OK;
}

void host_close(backend_device *on)
{
    free(on);
}

kvb_status host_check(backend_device *on, kvb_error *err)
{
    return on->failed == KVB_OK ? KVB_OK : kvb_fail(err, on->failed, "%s", on->error.message);
}

uint64_t host_free_bytes(backend_device *on)
{
    return 0;
}

// All threads: it is here that the system finds the pages, and clears them first.
static void clear(float *p, size_t bytes)
{
    enum { PIECE = 4 << 20 };
#pragma omp parallel for schedule(dynamic, 1) if (bytes > PIECE)
    for (size_t at = 0; at < bytes; at += PIECE) memset((char *)p + at, 0, bytes - at < PIECE ? bytes - at : PIECE);
}

// Large blocks ask for large pages: a pass over weights or keys then spares most of its page walks.
float *host_memory(size_t n_floats)
{
    enum { LINE = 64, LARGE_PAGE = 2 << 20 };
    size_t align = n_floats * sizeof(float) >= LARGE_PAGE ? LARGE_PAGE : LINE,
           bytes = (n_floats * sizeof(float) + LINE - 1) / LINE * LINE;
    float *p = NULL;
    if (posix_memalign((void **)&p, align, bytes ? bytes : LINE) != 0) return NULL;
    if (align == LARGE_PAGE)
        madvise(p, bytes / LARGE_PAGE * LARGE_PAGE, MADV_HUGEPAGE); // a wish: failure costs speed only
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

void host_sample(backend_device *on, int32_t *ids, dev logits, uint32_t n, uint32_t vocabulary, const sampler *s,
                 const draw_key *keys)
{
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t i = 0; i < n; i++)
        ids[i] = sampler_draw(s, logits.address + (size_t)i * vocabulary, vocabulary, &keys[i]);
}

float *host_matrix_values(const stored_matrix *w, unsigned hold)
{
    float *values = host_memory((size_t)w->out * w->in);
    bool ok = values != NULL;
#pragma omp parallel for schedule(static) reduction(&& : ok)
    for (uint32_t r = 0; r < w->out; r++) {
        ok = ok && stored_rows(w, r, 1, values + (size_t)r * w->in);
        if (ok && hold & HOLD_HALF) stored_round(values + (size_t)r * w->in, w->in);
    }
    if (ok) return values;
    free(values);
    return NULL;
}

void host_matrix_release(backend_device *on, dev_matrix *w)
{
    free(w->address);
    w->address = NULL;
}

size_t host_packed_floats(backend_device *on, uint32_t n_tokens, attention_shape s)
{
    return 0;
}

void host_pack_prefix(backend_device *on, const prefix_kv *kv, attention_shape s) {}
