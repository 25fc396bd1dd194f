// What a run of `eval` or `task` compares, as its reports see it.
#pragma once
#include "evaluator/method.h"
#include "tools/report/results.h"

typedef struct compared {
    method_list methods; // with their columns: a method under an allocator
    const allocator *allocators;
    size_t n_allocators;
    const double *ratios; // pruned shares, ascending
    size_t n_ratios;
} compared;

// Adds the setting "allocators", how each is called and what it is, and the tables among them as inputs.
void add_allocators(results *to, const compared *with);
