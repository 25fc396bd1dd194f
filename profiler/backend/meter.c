#include "profiler/backend/meter.h"
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

const char *const meter_names[METER_PHASES] = {"linear",  "attention", "softmax",  "oracle",
                                               "row ops", "scorers",   "sampling", "writing"};

// Each thread writes its own block; blocks are never given back, since a thread that ends has been counted.
typedef struct meter_block {
    meter_sum sums[METER_PHASES];
    struct meter_block *next;
} meter_block;

static meter_block *all_blocks;
static _Thread_local meter_block *own;

static meter_block *own_block(void)
{
    if (own || !(own = calloc(1, sizeof *own))) return own;
    own->next = __atomic_load_n(&all_blocks, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(&all_blocks, &own->next, own, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
    }
    return own;
}

double meter_add(meter_phase phase, double start, double flops, double bytes)
{
    meter_block *b = own_block();
    double now = meter_now();
    if (!b) return now; // a table without this thread's part is better than a run that fails
    b->sums[phase].seconds += now - start;
    b->sums[phase].flops += flops;
    b->sums[phase].bytes += bytes;
    return now;
}

void meter_add_parallel(meter_phase phase, double start, int threads)
{
    meter_block *b = own_block();
    if (b) b->sums[phase].seconds += (meter_now() - start) * threads;
}

void meter_read(meter_sum sums[METER_PHASES])
{
    memset(sums, 0, METER_PHASES * sizeof *sums);
    for (const meter_block *b = __atomic_load_n(&all_blocks, __ATOMIC_ACQUIRE); b; b = b->next)
        for (int i = 0; i < METER_PHASES; i++) {
            sums[i].seconds += b->sums[i].seconds;
            sums[i].flops += b->sums[i].flops;
            sums[i].bytes += b->sums[i].bytes;
        }
}
