// Memory of this process and of the machine, as Linux tells it, and sizes on the command line.
#pragma once
#include <stdbool.h>
#include <stdint.h>

// "4GiB", "512M", "1.5 GB", "8000000000": K, M, G, T and Ki, Mi, Gi, Ti, with or without B; without the i powers of
// 1000.
bool memory_parse(const char *text, uint64_t *bytes);

// Address space that a limit (ulimit -v) leaves to this process, in bytes; UINT64_MAX without a limit.
uint64_t memory_address_room(void);

// All in bytes; 0 where the system does not tell.
uint64_t memory_free(
    void); // what can be taken without swapping, limits of a container (cgroup) and of the address space included
uint64_t memory_resident(void); // of this process, now
uint64_t memory_peak(void);     // of this process, at most so far
