#include "profiler/backend.h"
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
    return !backend_find(name) && strcmp(name, "cuda") == 0
               ? "; this program was built without CUDA (no nvcc was found: `make showconfig`, tools/get-cuda.sh)"
               : "";
}
