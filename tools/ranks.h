// The processes that `mpirun` (or srun) started together for one run. Without a launcher, or in a build without MPI, a
// run is one rank of one and nothing here touches MPI: the program behaves as if MPI were not linked.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>

typedef struct ranks {
    int rank, size;             // of all
    int local_rank, local_size; // on this machine, which share its cores, memory and devices
} ranks;

// Tells whether a launcher started this process as one of several, as its environment variables say.
bool ranks_launched(void);

// Joins the run; *out receives this process's place in it. Every rank must call ranks_end() at the end. Fails with
// KVB_UNSUPPORTED if a launcher started several processes and this build has no MPI.
kvb_status ranks_begin(ranks *out, kvb_error *err);
void ranks_end(void);

// The following are collective: every rank must call them, in the same order. A rank that waits sleeps instead of
// spinning, since others on the machine may need its core.

// Returns KVB_OK if `mine` is KVB_OK on all ranks; otherwise the status of the lowest rank that has another one, and
// stores that rank in *who. `who` may be NULL.
kvb_status ranks_agree(const ranks *r, kvb_status mine, int *who);
void ranks_broadcast(const ranks *r, void *data, size_t size); // from rank 0
void ranks_sum(const ranks *r, double *values, int n);         // every rank receives the sums
void ranks_largest(const ranks *r, double *values, int n);
