#include "tools/device.h"
#include "profiler/packed.h"
#include <stdio.h>
#include <string.h>

const backend *device_find(const cli_command *self, const char *name, const char *compute)
{
    const backend *found = backend_find_compute(name, compute);
    if (!found) {
        fprintf(stderr, "Backends, and what --compute may say:\n");
        for (const backend *const *b = backend_list; *b; b++)
            fprintf(stderr, "  %-6s %-7s %s\n", (*b)->name, (*b)->compute, (*b)->summary);
        if (backend_find(name)) cli_usage_error(self, "--compute: backend %s has no '%s'", name, compute);
        else cli_usage_error(self, "--backend: there is no '%s'%s", name, backend_absence(name));
        return NULL;
    }
    if (strcmp(name, "cpu") == 0 && strcmp(found->compute, "f32") != 0 && !packed_is_native())
        fprintf(stderr,
                "warning: no unit of this CPU multiplies bfloat16: --compute %s gives its numbers, but f32 is faster\n",
                found->compute);
    return found;
}
