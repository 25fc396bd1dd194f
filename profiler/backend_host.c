#include "profiler/backend_host.h"
#include "profiler/meter.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

kvb_status host_open(kvb_error *err)
{
    (void)err;
    return KVB_OK;
}

kvb_status host_check(kvb_error *err)
{
    (void)err;
    return KVB_OK;
}

uint64_t host_free_bytes(void)
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
dev host_alloc(size_t n_floats)
{
    enum { LINE = 64, LARGE_PAGE = 2 << 20 };
    size_t align = n_floats * sizeof(float) >= LARGE_PAGE ? LARGE_PAGE : LINE,
           bytes = (n_floats * sizeof(float) + LINE - 1) / LINE * LINE;
    float *p = NULL;
    if (posix_memalign((void **)&p, align, bytes ? bytes : LINE) != 0) return (dev){NULL};
    if (align == LARGE_PAGE)
        madvise(p, bytes / LARGE_PAGE * LARGE_PAGE, MADV_HUGEPAGE); // a wish: failure costs speed only
    clear(p, bytes);
    return (dev){p};
}

void host_release(dev memory)
{
    free(memory.address);
}

void host_upload(dev to, const float *from, size_t n)
{
    memcpy(to.address, from, n * sizeof(float));
}

void host_download(float *to, dev from, size_t n)
{
    memcpy(to, from.address, n * sizeof(float));
}

void host_copy(dev to, dev from, size_t n)
{
    memcpy(to.address, from.address, n * sizeof(float));
}

void host_clear(dev memory, size_t n)
{
    memset(memory.address, 0, n * sizeof(float));
}

const float *host_view(dev from)
{
    return from.address;
}

void host_sample(int32_t *ids, dev logits, uint32_t n, uint32_t vocabulary, const sampler *s, const draw_key *keys)
{
    double start = meter_now();
#pragma omp parallel for schedule(dynamic, 1)
    for (uint32_t i = 0; i < n; i++)
        ids[i] = sampler_draw(s, logits.address + (size_t)i * vocabulary, vocabulary, &keys[i]);
    meter_add_parallel(METER_SAMPLING, start, omp_get_max_threads());
}

dev_matrix host_matrix_load(const stored_matrix *w, bool keep_rows,
                            dev_matrix (*upload)(const float *w, uint32_t out, uint32_t in, bool keep_rows))
{
    float *values = malloc((size_t)w->out * w->in * sizeof *values);
    bool ok = values != NULL;
#pragma omp parallel for schedule(static) reduction(&& : ok)
    for (uint32_t r = 0; r < w->out; r++) ok = ok && stored_rows(w, r, 1, values + (size_t)r * w->in);
    dev_matrix m = {.out = w->out, .in = w->in};
    if (ok) m = upload(values, w->out, w->in, keep_rows);
    free(values);
    return m;
}

void host_matrix_release(dev_matrix *w)
{
    free(w->address);
    w->address = NULL;
}

size_t host_packed_floats(uint32_t n_tokens, attention_shape s)
{
    (void)n_tokens;
    (void)s;
    return 0;
}

void host_pack_prefix(const prefix_kv *kv, attention_shape s)
{
    (void)kv;
    (void)s;
}
