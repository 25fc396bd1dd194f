// The processes of one run that `mpirun` (or srun) has started together. Without them, or in a build without MPI, a run
// is one rank of one, and nothing here touches MPI: the program then starts and ends as if it were not linked.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>
#include <stddef.h>

typedef struct ranks {
    int rank, size;             // of all
    int local_rank, local_size; // on this machine, which share its cores, memory and devices
} ranks;

// Whether a launcher started this process as one of several (it says so in the environment).
bool ranks_launched(void);

// *out receives the process's place. KVB_UNSUPPORTED when a launcher started several and this build has no MPI.
// ranks_end must follow, on every rank.
kvb_status ranks_begin(ranks *out, kvb_error *err);
void ranks_end(void);

// Every rank calls these together, like any collective operation. Waiting ranks sleep instead of spinning, since others
// on the machine may need the core.
// The first status other than KVB_OK in the order of ranks, or KVB_OK; *who (NULL: not wanted) receives that rank.
kvb_status ranks_agree(const ranks *r, kvb_status mine, int *who);
void ranks_broadcast(const ranks *r, void *data, size_t size); // from rank 0
void ranks_sum(const ranks *r, double *values, int n);         // every rank receives the sums
void ranks_largest(const ranks *r, double *values, int n);
