// Where the time goes: seconds, floating-point operations and bytes of each kind of work, for the roofline table.
// Always on: an entry costs two readings of the clock, and entries stand around work of tens of microseconds.
#pragma once
#include <time.h>

typedef enum meter_phase {
    METER_LINEAR,    // products with the model's matrices
    METER_ATTENTION, // products of attention
    METER_SOFTMAX,   // maximum, exponentials and sum, rounding of the probabilities
    METER_ORACLE,    // importance
    METER_ROWS,      // norms, RoPE, activation, moving keys and values
    METER_SCORERS,
    METER_SAMPLING,
    METER_WRITING,
    METER_PHASES
} meter_phase;

extern const char *const meter_names[METER_PHASES];

// Sums over all threads; `seconds` counts each thread's own.
typedef struct meter_sum {
    double seconds, flops, bytes;
} meter_sum;

static inline double meter_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Adds to the caller's own counts what it has done since `start`. Bytes are those that must move at least. Returns the
// time, at which what follows begins.
double meter_add(meter_phase phase, double start, double flops, double bytes);
// Work that keeps `threads` threads busy although one of them tells of it.
void meter_add_parallel(meter_phase phase, double start, int threads);

void meter_read(meter_sum sums[METER_PHASES]); // outside of parallel regions
