// One problem under constraints while it is being solved: what constrained*.c share. The way is constrained.h's:
// solving_make_budgets(), then solving_level_rows() or solving_sweep_rows() fill keep, lambda and price.
#pragma once
#include "solver/constrained.h"
#include "solver/levels.h"

// Everything about one problem.
typedef struct solving {
    constrained_instance x;
    level_part *levels; // [groups * parts], or NULL
    uint32_t n_rows;
    const double *ratios;
    uint64_t *budget;       // [R, groups]
    uint32_t *keep;         // [R, N] units, in the instance's order
    double *lambda;         // [R, groups]
    double *price;          // [groups * parts] at which a part meets its cap; 0: it does by itself
    uint8_t *saturated;     // [R]
    uint64_t *least, *most; // [groups]
} solving;

// Whether threads are worth waking: every row, or part, looks at numbers of all heads or its own.
static inline bool solving_is_large(const solving *s)
{
    return (size_t)shape_heads(&s->x.curves.shape) * s->x.curves.shape.n_tokens > PARALLEL_CELLS / 8;
}

static inline uint32_t solving_group_heads(const solving *s)
{
    return s->x.parts * s->x.own;
}

// Units that a part's heads keep together; units [N].
static inline uint64_t solving_part_total(const solving *s, uint32_t part, const uint32_t *units)
{
    uint64_t sum = 0;
    for (uint32_t h = part * s->x.own; h < (part + 1) * s->x.own; h++) sum += units[h];
    return sum;
}

// Makes budget, saturated, least and most, with levels the parts' clusters too, and room for all else; s has x, n_rows
// and ratios. KVB_ARGUMENT for contradictions, KVB_MEMORY; solving_free() in any case.
kvb_status solving_make_budgets(solving *s, kvb_error *err);
void solving_free(solving *s);

// With levels: makes s->levels and adds to s->least what their parts keep at any price (constrained_levels.c).
kvb_status solving_make_levels(solving *s, kvb_error *err);

// Fill keep, lambda and price of every row and group: with levels, and without (constrained_sweep.c; KVB_MEMORY).
void solving_level_rows(solving *s);
kvb_status solving_sweep_rows(solving *s, kvb_error *err);
