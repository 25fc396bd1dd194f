#include "tools/device.h"
#include "profiler/backend/packed.h"
#include "tools/memory.h"
#include <omp.h>
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
    precision p = precision_named(found->compute);
    if (strcmp(name, "cpu") == 0 && p != PRECISION_F32 && operand_is_plain(p))
        fprintf(stderr, "note: %s is no faster than f32 on this CPU, so operands keep the bits of float32\n",
                found->compute);
    return found;
}

int device_take_threads(const cli_command *self, uint64_t threads)
{
    // Measured with the smallest model: 2 threads needed 33 MiB besides the program, most of it code made at run time.
    // If two of them allocate at the same moment, glibc also reserves 64 MiB of addresses for a thread's own heap.
    enum { MIB_FOR_ALL = 48, MIB_PER_THREAD = 16 + 64 };
    if (threads > DEVICE_THREADS_MAX)
        return cli_usage_error(self, "--threads: expected at most %d, found %llu", DEVICE_THREADS_MAX,
                               (unsigned long long)threads);
    int limit = omp_get_thread_limit(); // OMP_THREAD_LIMIT
    if (threads) omp_set_num_threads((int)threads < limit ? (int)threads : limit);
    uint64_t room = memory_address_room() >> 20, taken = (uint64_t)omp_get_max_threads();
    if (room >= MIB_FOR_ALL + MIB_PER_THREAD * taken) return EXIT_DONE;
    fprintf(stderr,
            "kvbudget %s: the address space is limited (ulimit -v), and %llu MiB are left; expected at least %llu for "
            "%llu threads besides the model: raise the limit, or use fewer threads\n",
            self->name, (unsigned long long)room, (unsigned long long)(MIB_FOR_ALL + MIB_PER_THREAD * taken),
            (unsigned long long)taken);
    return EXIT_FAILED;
}
