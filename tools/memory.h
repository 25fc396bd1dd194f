// Memory of this process and of the machine, as Linux reports it, and sizes on the command line.
#pragma once
#include <stdbool.h>
#include <stdint.h>

// Parses a size such as "4GiB", "512M", "1.5 GB" or "8000000000". Units are K, M, G, T (powers of 1000) and Ki, Mi, Gi,
// Ti (powers of 1024), each with or without B. Returns false for anything else; *bytes is then left alone.
bool memory_parse(const char *text, uint64_t *bytes);

// Returns how many bytes of address space a limit (ulimit -v) leaves to this process; UINT64_MAX without a limit.
uint64_t memory_address_room(void);

// Each returns bytes, or 0 if the system does not say.

// What this process can still take without swapping, within the limits of its container (cgroup) and address space.
uint64_t memory_free(void);
// What this process holds in memory now, and the most that it has held so far.
uint64_t memory_resident(void);
uint64_t memory_peak(void);
