// What this machine can do at the most, measured now on all threads: what a run's rates are compared with. Each takes a
// few tenths of a second; the best of some passes counts, since others may use the machine. 0: there was no memory.
#pragma once
#include "profiler/backend/packed.h"

// FLOP/s of products that stay in the caches, each thread with its own: the peak of a matrix unit as the cpu backend
// reaches it.
double peak_products(precision p);
// The same of float32's own units, through SGEMM.
double peak_sgemm(void);
// Bytes per second that all threads together read from memory, far beyond the caches.
double peak_reading(void);
