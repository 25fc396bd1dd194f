#include "profiler/backend/backend.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <string.h>

const backend *const backend_list[] = {&backend_cpu,       &backend_cpu_bf16x3,
                                       &backend_cpu_bf16,
#ifdef KVB_CUDA
                                       &backend_cuda,      &backend_cuda_bf16x3,
                                       &backend_cuda_bf16,
#endif
                                       &backend_ref,       NULL};

const backend *backend_find_compute(const char *name, const char *compute)
{
    for (const backend *const *b = backend_list; *b; b++)
        if (strcmp((*b)->name, name) == 0 && strcmp((*b)->compute, compute ? compute : "f32") == 0) return *b;
    return NULL;
}

const backend *backend_find(const char *name)
{
    return backend_find_compute(name, NULL);
}

const char *backend_absence(const char *name)
{
    return !backend_find(name) && strcmp(name, "cuda") == 0 ? "; this program was built without CUDA (no nvcc was "
                                                              "found: `make showconfig`, tools/scripts/get-cuda.sh)"
                                                            : "";
}

dev backend_memory(backend_device *on, size_t n_floats, const char *what)
{
    dev memory = on->b->alloc(on, n_floats);
    needed(memory.address, what);
    return memory;
}

dev_matrix backend_matrix(backend_device *on, const float *w, uint32_t out, uint32_t in, bool keep_rows)
{
    stored_matrix floats = stored_floats(w, out, in);
    return on->b->matrix_load(on, &floats, keep_rows); // cppcheck-suppress returnDanglingLifetime ; it copies
}

void backend_fail(backend_device *on, kvb_status status, const char *format, ...)
{
    char message[sizeof on->error.message];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
#pragma omp critical(backend_fail)
    if (on->failed == KVB_OK) on->failed = kvb_fail(&on->error, status, "%s", message);
}
