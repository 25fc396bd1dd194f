// What engines demand of budgets beyond their sum, as integers of one problem.
//
// The wishes are shares and counts (runtime/limits.h, which the runtime keeps to as well). For one problem they become
// a problem of the same kind in coarser units: a page of `block` tokens is one unit, the curve of a head is read off at
// whole pages, and every head may keep least .. most units. Heads are put in another order,
//
//     groups, each with a budget of its own:  the model, or each layer (scope layer); each split by ranks
//       parts, each with a cap:               the heads of one layer in that group
//         heads
//
// because budgets, caps and numbers of levels are then demands on neighbours. Equal totals of ranks need no more than
// equal budgets: the sum is given, so every rank's share of it is.
#pragma once
#include "runtime/limits.h"
#include "solver/greedy.h"

typedef struct constrained_instance {
    const kvb_limits *limits;
    cache_shape shape;   // the problem's
    loss_curves curves;  // in units, heads in the order above; nothing is protected in them
    uint32_t n_groups;   // groups, ..
    uint32_t parts, own; // .. parts in each of them, heads in each part
    uint32_t *origin;    // [N] index l G + g of a head
    uint32_t *least;     // [N] units that it keeps at the least ..
    uint32_t *most;      // [N] .. and at the most
    uint64_t *cap;       // [groups, parts] units that the part keeps at the most
} constrained_instance;

// [units + 1] losses of head h of the instance.
static inline const double *instance_curve(const constrained_instance *x, uint32_t h)
{
    return x->curves.loss + (size_t)h * (x->curves.shape.n_tokens + 1);
}

// Makes the instance of one problem; limits and curves must outlive it. KVB_ARGUMENT when limits contradict each other
// at this number of tokens, with head or layer and the numbers. On failure *x is zero.
kvb_status constrained_instance_make(constrained_instance *x, const kvb_limits *limits, const loss_curves *curves,
                                     kvb_error *err);
void constrained_instance_free(constrained_instance *x);

// Budgets [n_groups] in units of the groups at a prune ratio, before limits: the whole pages in (1 - ratio) L G T
// tokens, the same number for every rank. Never more than that share, so that a budget in bytes is kept to at any T.
void constrained_targets(const constrained_instance *x, double ratio, uint64_t *budget);

// Raises every budget to what the groups that share its total must keep, and lowers it to what they may keep.
// least, most [n_groups]: units of each group. Returns whether any had to be raised: the row is saturated.
bool constrained_clamp(const constrained_instance *x, const uint64_t *least, const uint64_t *most, uint64_t *budget);

// The least share of the cache that lower limits (floors, pins, levels above them) make budgets keep, at any length and
// page size: no ratio above 1 minus this can be met. With ranks or layer totals it is that of the group that must keep
// most, for the others follow.
double constrained_demand(const kvb_limits *limits);

// Whether keep [L, G] (tokens, T = n_tokens) keeps to every limit; the error says which is broken and where. It counts
// for itself, without instances, so that tests can judge solver and runtime by it. Fixed totals (the ratio) are not
// limits: only their equality over ranks is checked.
kvb_status constrained_check(const kvb_limits *limits, uint32_t n_tokens, const uint32_t *keep, kvb_error *err);
