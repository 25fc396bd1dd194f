// Greedy allocation for many global ratios in one sweep.
//
// Exact problem: choose b_n >= floor with sum b_n = B that minimises sum loss_n(b_n). It has one class per head and T
// items per class (a multiple-choice knapsack). On the hulls the optimum is simple: start with everything kept and
// drop, again and again, the cheapest of the heads' last tokens (LU-KV algorithm 1). Tokens of one block are worth the
// same, so whole blocks are sorted once by (slope, layer, head, position) and drained in that order; the state at every
// target is recorded on the way. Ties are drained head by head, so at most one head stops inside a block: greedy is
// optimal except for that head (certificate.h).
//
// Budgets of a higher ratio never exceed those of a lower one.
#pragma once
#include "solver/pava.h"

typedef enum solve_scope {
    SCOPE_GLOBAL, // one budget over all heads of the model
    SCOPE_LAYER   // every layer meets the ratio by itself
} solve_scope;

// Returns how many tokens to drop at a prune ratio: rint(ratio * L * G * T), half to even, multiplied in double from
// left to right as in the published code. Exact halves are common (T = 4125, 90 heads, 1 %), and then the rounding
// error decides. With SCOPE_LAYER, pass n_layers = 1.
uint64_t prune_target(double ratio, uint32_t n_layers, uint32_t n_kv_heads, uint32_t n_tokens);

// The ratios of a table: ratios[i] = (i + 1) / 100.0.
#define TABLE_ROWS 99
void table_ratios(double ratios[TABLE_ROWS]);

// What every head keeps at each of R ratios. Groups: 1 for SCOPE_GLOBAL, L for SCOPE_LAYER.
typedef struct allocation {
    uint32_t n_rows, n_heads, n_groups;
    uint32_t *keep;     // [R, N] tokens that stay, protected ones included
    double *lambda;     // [R, groups] slope of the last block touched, 0 before the first: the certificate's multiplier
    uint8_t *saturated; // [R] 1: all heads of a group are at the floor and the target was not reached
    void *work;         // the sweep's memory
} allocation;

// Memory for a shape, a scope and a number of ratios, to be used again.
void allocation_init(allocation *a, const cache_shape *shape, solve_scope scope, uint32_t n_rows);
void allocation_free(allocation *a);

// Prune ratios are in [0, 1] and ascend; equal ones are allowed. Errors: KVB_ARGUMENT.
kvb_status prune_ratios_check(const double *ratios, uint32_t n, kvb_error *err);

// ratios [R]: prune ratios. Errors: KVB_ARGUMENT.
kvb_status greedy_sweep(allocation *a, const loss_curves *c, const hulls *h, const double *ratios, kvb_error *err);
