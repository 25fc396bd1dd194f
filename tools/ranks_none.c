// A build without MPI: one rank. The Makefile takes this file or ranks_mpi.c.
#include "runtime/fail.h"
#include "tools/ranks.h"
#include <stdlib.h>

kvb_status ranks_begin(ranks *out, kvb_error *err)
{
    const char *size = getenv("OMPI_COMM_WORLD_SIZE");
    *out = (ranks){0, 1, 0, 1};
    if (!ranks_launched() || (size && atoi(size) == 1)) return KVB_OK;
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "was started as one of several processes, but is built without MPI; install libopenmpi-dev and "
                    "build again, or use --shard I/N and `kvbudget merge`");
}

void ranks_end(void) {}

kvb_status ranks_agree(const ranks *r, kvb_status mine, int *who)
{
    if (who) *who = r->rank;
    return mine;
}

void ranks_broadcast(const ranks *r, void *data, size_t size)
{
    (void)r, (void)data, (void)size;
}

void ranks_sum(const ranks *r, double *values, int n)
{
    (void)r, (void)values, (void)n;
}

void ranks_largest(const ranks *r, double *values, int n)
{
    (void)r, (void)values, (void)n;
}
