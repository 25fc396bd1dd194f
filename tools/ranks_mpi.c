// Ranks through MPI. Errors of MPI itself end the whole job (its default handler): no rank can go on without it, and
// what is finished is on the disk.
#include "runtime/fail.h"
#include "tools/ranks.h"
#include <mpi.h>
#include <time.h>

static bool begun;

kvb_status ranks_begin(ranks *out, kvb_error *err)
{
    *out = (ranks){0, 1, 0, 1};
    if (!ranks_launched()) return KVB_OK;
    int level = 0;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) != MPI_SUCCESS || level < MPI_THREAD_FUNNELED)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "MPI cannot be started together with threads; give the launcher's MPI, or use "
                        "--shard I/N and `kvbudget merge`");
    begun = true;
    MPI_Comm_rank(MPI_COMM_WORLD, &out->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &out->size);
    MPI_Comm local;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, out->rank, MPI_INFO_NULL, &local);
    MPI_Comm_rank(local, &out->local_rank);
    MPI_Comm_size(local, &out->local_size);
    MPI_Comm_free(&local);
    return KVB_OK;
}

void ranks_end(void)
{
    if (begun) MPI_Finalize();
    begun = false;
}

// Sleeps until the request is done. MPI_Wait would spin, and a rank may wait here for as long as another one computes.
static void wait_asleep(MPI_Request request)
{
    struct timespec pause = {0, 100000}; // grows to 10 ms
    for (int done = 0;;) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done) return;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < 10000000) pause.tv_nsec *= 2;
    }
}

kvb_status ranks_agree(const ranks *r, kvb_status mine, int *who)
{
    if (who) *who = r->rank;
    if (!begun) return mine;
    int first = mine == KVB_OK ? r->size : r->rank, status = (int)mine;
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD, &request);
    wait_asleep(request);
    if (first == r->size) return KVB_OK;
    MPI_Bcast(&status, 1, MPI_INT, first, MPI_COMM_WORLD);
    if (who) *who = first;
    return (kvb_status)status;
}

void ranks_broadcast(const ranks *r, void *data, size_t size)
{
    (void)r;
    enum { STEP = 1 << 30 }; // counts are int
    char *at = data;
    for (MPI_Request request; begun && size; at += STEP) {
        size_t n = size < STEP ? size : STEP;
        MPI_Ibcast(at, (int)n, MPI_BYTE, 0, MPI_COMM_WORLD, &request);
        wait_asleep(request);
        size -= n;
    }
}

static void reduce(double *values, int n, MPI_Op op)
{
    if (!begun) return;
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, values, n, MPI_DOUBLE, op, MPI_COMM_WORLD, &request);
    wait_asleep(request);
}

void ranks_sum(const ranks *r, double *values, int n)
{
    (void)r;
    reduce(values, n, MPI_SUM);
}

void ranks_largest(const ranks *r, double *values, int n)
{
    (void)r;
    reduce(values, n, MPI_MAX);
}
