#include "profiler/backend.h"
#include <string.h>

const backend *const backend_list[] = {&backend_cpu, &backend_ref, NULL};

const backend *backend_find(const char *name)
{
    for (const backend *const *b = backend_list; *b; b++)
        if (strcmp((*b)->name, name) == 0) return *b;
    return NULL;
}
