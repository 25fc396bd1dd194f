// The constraints that engines put on budgets beyond their sum, in the integers of one problem.
// Constraints are given as shares and counts (runtime/limits.h, which the runtime respects as well). They turn one
// problem into another of the same kind with coarser units: a page of `block` tokens is one unit, a head's curve is
// sampled at whole pages, and every head may keep least .. most units. Heads are reordered,
//
//     groups, each with a budget of its own:  the model, or each layer (scope layer); each split by ranks
//       parts, each with a cap:               the heads of one layer in that group
//         heads
//
// so that budgets, caps and levels each apply to consecutive heads. To make the totals of ranks equal it is enough to
// give the ranks equal budgets, since the sum is given.
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
    uint32_t *most;      // [N] .. and at most
    uint64_t *cap;       // [groups, parts] units that the part keeps at most
} constrained_instance;

// [units + 1] losses of head h of the instance.
static inline const double *instance_curve(const constrained_instance *x, uint32_t h)
{
    return x->curves.loss + (size_t)h * (x->curves.shape.n_tokens + 1);
}

// Loss of the heads first .. first + n - 1 that keep so many units each.
double instance_loss(const constrained_instance *x, uint32_t first, uint32_t n, const uint32_t *keep);

// Makes the instance of one problem; limits and curves must outlive it. Fails with KVB_ARGUMENT if limits contradict
// each other at this number of tokens; the message names the head or layer and the numbers. On failure *x is zero.
kvb_status constrained_instance_make(constrained_instance *x, const kvb_limits *limits, const loss_curves *curves,
                                     kvb_error *err);
void constrained_instance_free(constrained_instance *x);

// Computes the groups' budgets [n_groups] in units at a prune ratio, before limits: the whole pages in (1 - ratio) L G
// T tokens, the same number for every rank. They never exceed that share, so a budget in bytes is respected at any T.
void constrained_targets(const constrained_instance *x, double ratio, uint64_t *budget);

// Raises every budget to the least, and lowers it to the most, that the groups sharing its total may keep. least, most
// [n_groups]: units of each group. Returns true if a budget had to be raised: then the row is saturated.
bool constrained_clamp(const constrained_instance *x, const uint64_t *least, const uint64_t *most, uint64_t *budget);

// Returns the smallest share of the cache that lower limits (floors, pins, levels above them) allow, at any length and
// page size: no ratio above 1 minus this can be reached. With ranks or layer totals it is the share of the group that
// must keep most, since the other groups have to match it.
double constrained_demand(const kvb_limits *limits);

// Checks that keep [L, G] (tokens, T = n_tokens) respects every limit; the error says which one is broken and where. It
// does not use instances, so tests can judge the solver and the runtime by it. Totals are not limits: only their
// equality over ranks is checked.
kvb_status constrained_check(const kvb_limits *limits, uint32_t n_tokens, const uint32_t *keep, kvb_error *err);
