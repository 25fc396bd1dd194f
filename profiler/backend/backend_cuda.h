// What the benchmark asks of the cuda backend beyond the seam.
#pragma once
#include "profiler/backend/backend.h"

// A weight [out, in] for products on `on` (of one of backend_cuda*), of uniform random numbers in (-scale, scale), each
// rounded to bfloat16, made on the device: the same for the same seed. Both pointers are NULL when memory is short.
// Released with matrix_release.
dev_matrix backend_cuda_random_matrix(backend_device *on, uint32_t out, uint32_t in, float scale, uint64_t seed);
