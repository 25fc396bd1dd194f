// Options of the commands that run a model: --backend, --compute.
#pragma once
#include "profiler/backend/backend.h"
#include "tools/cli.h"

#define DEVICE_COMPUTE_HELP                                                                                            \
    "precision of matrix products: f32 (on a CPU with AMX through bfloat16 in three\nparts, as exact as float32 and "  \
    "twice "                                                                                                           \
    "as fast); bf16x3 (operands in two bfloat16\nparts, 16 bits: nearly f32, and faster with a bfloat16 matrix unit, " \
    "slower\nwithout); bf16 (8 bits: fastest, another model in the third digit); sums, softmax\nand oracle stay f32"

// The backend of that name and precision; NULL after a message about how the command is used (then return EXIT_USAGE).
// Says so on stderr when this machine has no unit for the precision.
const backend *device_find(const cli_command *self, const char *name, const char *compute);

// More threads than this would overflow the stack on which OpenMP's library keeps what it tells each of them.
enum { DEVICE_THREADS_MAX = 1024 };

// Sets the number of OpenMP threads (0: as it is; it changes no number). A limit of the address space (ulimit -v) must
// leave room for them and for what the math library makes at run time, since that library ends the program where it
// finds none. Returns EXIT_DONE, or EXIT_USAGE or EXIT_FAILED after a message.
int device_take_threads(const cli_command *self, uint64_t threads);
