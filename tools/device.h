// Options of the commands that run a model: --backend, --compute.
#pragma once
#include "profiler/backend/backend.h"
#include "tools/cli.h"

#define DEVICE_COMPUTE_HELP                                                                                            \
    "precision of matrix products: f32 (on a CPU with AMX through bfloat16 in three\nparts, as exact as float32 and "  \
    "twice "                                                                                                           \
    "as fast); bf16x3 (operands in two bfloat16\nparts, 16 bits: nearly f32, and faster with AMX, the same without); " \
    "bf16 (8\nbits: fastest, another model in the third digit; f32 on a CPU that cannot multiply\nit); sums, "         \
    "softmax and oracle stay f32"

// Returns the backend with this name and precision. If there is none, prints a usage message and returns NULL; the
// caller then returns EXIT_USAGE. Says so on stderr if this machine computes in f32 instead.
const backend *device_find(const cli_command *self, const char *name, const char *compute);

// With more threads, OpenMP's library would overflow the stack on which it keeps a record of each.
enum { DEVICE_THREADS_MAX = 1024 };

// Sets the number of OpenMP threads; 0 leaves it as it is. Results do not depend on it. Also checks that a limit on the
// address space (ulimit -v) leaves room for the threads and for the code that the math library generates at run time,
// because that library ends the program when it finds none. Returns EXIT_DONE, or, after a message, EXIT_USAGE or
// EXIT_FAILED.
int device_take_threads(const cli_command *self, uint64_t threads);
