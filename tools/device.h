// Options of the commands that run a model: --backend, --compute, --query-statistics.
#pragma once
#include "profiler/backend.h"
#include "tools/cli.h"

#define DEVICE_COMPUTE_HELP                                                                                           \
    "precision of matrix products: f32; bf16x3 (operands in two bfloat16 parts, 16 bits:\nnearly f32, and two to "    \
    "three "                                                                                                          \
    "times as fast with a bfloat16 matrix unit, slower without);\nbf16 (8 bits: fastest, another model in the third " \
    "digit); sums, softmax and oracle stay f32"

// --query-statistics, for the commands that score contexts.
#define QUERY_STATISTICS_OPTION(path)                                                  \
    {                                                                                  \
        "query-statistics", 0, CLI_TEXT, &(path), "FILE",                              \
            "stored query statistics, for metrics with stored=1 (kvbudget statistics)" \
    }

// The backend of that name and precision; NULL after a message about how the command is used (then return EXIT_USAGE). Says so on
// stderr when this machine has no unit for the precision.
const backend *device_find(const cli_command *self, const char *name, const char *compute);
