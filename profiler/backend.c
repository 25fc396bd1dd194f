#include "profiler/backend.h"
#include <string.h>

#ifdef KVB_CUDA
const backend *const backend_list[] = {&backend_cpu, &backend_cuda, &backend_ref, NULL};
#else
const backend *const backend_list[] = {&backend_cpu, &backend_ref, NULL};
#endif

const backend *backend_find(const char *name)
{
    for (const backend *const *b = backend_list; *b; b++)
        if (strcmp((*b)->name, name) == 0) return *b;
    return NULL;
}

const char *backend_absence(const char *name)
{
    return !backend_find(name) && strcmp(name, "cuda") == 0
               ? "; this program was built without CUDA (no nvcc was found: `make showconfig`, tools/get-cuda.sh)"
               : "";
}
