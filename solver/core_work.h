// What the parts of exact_core.h share: the choices that are left, and what heads that were not handled yet can still
// do about the number of tokens (core_reduce.c), for the dynamic program over them (exact_core.c).
#pragma once
#include "solver/exact_core.h"
#include "solver/radix.h"

// A choice that is left: its reduced cost and the tokens that it keeps.
typedef struct choice {
    double cost;
    uint32_t keep;
} choice;

// Choices by head: those of head h are at[first[h]] .. at[first[h + 1] - 1], fewest tokens first.
typedef struct choices {
    choice *at;
    size_t *first;
    size_t capacity;
} choices;

// Ways of the heads not handled yet to take more or fewer tokens than their minimisers, cheapest token first: key holds
// the cost of one token, a the head, b the number of tokens.
typedef struct moves {
    keyed *at;
    size_t count;
} moves;

// The states after one head: sums low .. low + count - 1 of tokens beyond the minimisers.
typedef struct layer {
    uint32_t head;
    int64_t low;
    size_t count, offset; // values[offset + x - low]
} layer;

struct core_work {
    choices all, active; // after the reduction by the gap, and by theta
    uint32_t *base;      // [n] minimisers of L_n(b) + lambda b
    uint32_t *order, *stack;
    moves more, fewer;
    keyed *scratch;
    layer *layers; // [n + 1]
    double *values, *price;
    size_t heads, moves_capacity, values_capacity, price_capacity;
};

// Fewest and most tokens that head h of the problem may keep.
static inline uint32_t core_least(const core_problem *p, uint32_t h)
{
    return p->least ? p->least[h] : p->curves->floor;
}

static inline uint32_t core_cap(const core_problem *p, uint32_t h)
{
    return p->cap ? p->cap[h] : p->curves->shape.n_tokens;
}

// Makes room for `count` elements of `size` bytes in *(void **)array; grows by half more than is asked, so that growing
// is rare. False: no memory, and the array is as it was.
bool core_grow(void *array, size_t *capacity, size_t count, size_t size);

// Finds every head's minimiser, the fewest tokens of equal ones; returns the loss of start - D(lambda). Summed from
// reduced costs, it is exact to its own size, not to that of the losses.
double core_minimise(core_work *w, const core_problem *p, double lambda);

// What the limits are wider by against rounding; see exact_core.h.
double core_margin(const core_problem *p, double lambda, double gap);

// Makes w->all: the choices with a reduced cost of at most `theta` that no choice of fewer tokens equals in loss.
// KVB_MEMORY.
kvb_status core_reduce(core_work *w, const core_problem *p, double lambda, double theta, kvb_error *err);

// Makes w->active of the n heads: the choices of w->all within a smaller theta. KVB_MEMORY.
kvb_status core_narrow(core_work *w, uint32_t n, double theta, kvb_error *err);

// Makes w->more and w->fewer of the active choices: their hulls, merged by slope. KVB_MEMORY.
kvb_status core_make_moves(core_work *w, uint32_t n, kvb_error *err);

// Takes the moves of a head away: it is handled now.
void core_drop_head(moves *m, uint32_t head);

// Most tokens that the moves, and after them tokens at `spare` each, can make up for within theta.
int64_t core_reach(const moves *m, double theta, double spare);

// Least cost of making up for 0, 1, .. count - 1 tokens, each `step` further in price[].
void core_price_tokens(const moves *m, double spare, int64_t skip, double *price, int64_t count, int step);
