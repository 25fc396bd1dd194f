// What a run of `eval` or `task` compares, as its reports see it.
#pragma once
#include "evaluator/method.h"
#include <cjson/cJSON.h>
#include <stdbool.h>

typedef struct compared {
    method_list methods; // with their columns: a method under an allocator
    const allocator *allocators;
    size_t n_allocators;
    const double *ratios; // pruned shares, ascending
    size_t n_ratios;
} compared;

// Adds the list "allocators" to a report: how each is called, and what it is. False: no memory.
bool add_allocators(cJSON *report, const compared *with);
