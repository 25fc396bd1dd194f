// A build without MPI: one rank. The Makefile takes this file or ranks_mpi.c.
#include "runtime/fail.h"
#include "tools/ranks.h"
#include <stdlib.h>

// Tells whether the launcher says that it started one process.
static bool is_alone(void)
{
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    const char *size = NULL;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !size; i++) size = getenv(sizes[i]);
    return size && atoi(size) == 1;
}

kvb_status ranks_begin(ranks *out, kvb_error *err)
{
    *out = (ranks){0, 1, 0, 1};
    if (!ranks_launched() || is_alone()) return KVB_OK;
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
