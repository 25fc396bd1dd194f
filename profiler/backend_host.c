#include "profiler/backend_host.h"
#include <stdlib.h>
#include <string.h>

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

dev host_alloc(size_t n_floats)
{
    size_t bytes = (n_floats * sizeof(float) + 63) / 64 * 64;
    float *p = aligned_alloc(64, bytes ? bytes : 64);
    if (p) memset(p, 0, bytes);
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

void host_matrix_release(dev_matrix *w)
{
    free(w->address);
    w->address = NULL;
}
