// Where a run's time went, against what this machine can do.
#pragma once
#include "profiler/backend/backend.h"

// Prints to stderr, for each kind of work of the run that has just ended: seconds (of all threads together, divided by
// their number), share of the wall clock, rate, and share of the peak that is measured now, on all threads, in
// `device`'s precision. Takes about a second.
void roofline_print(const backend *device, double wall);
