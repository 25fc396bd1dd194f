// Stored query statistics from bytes.
#include "profiler/metric/query_statistics.h"
#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { L = 1, H = 2, D = 2 };
    query_statistics *s;
    kvb_error err;
    if (query_statistics_parse(&s, data, size, "fuzz.safetensors", L, H, D, &err) != KVB_OK) return 0;
    for (int i = 0; i < L * H * D; i++)
        if (!isfinite(s->mean[i])) abort();
    for (int i = 0; i < L * H * D * D; i++)
        if (!isfinite(s->covariance[i])) abort();
    query_statistics_free(s);
    return 0;
}
