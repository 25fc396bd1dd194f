// Constrained budgets without levels: the hulls of the heads, cheapest blocks first.
#include "runtime/fail.h"
#include "solver/radix.h"
#include "solver/solving.h"
#include <stdlib.h>
#include <string.h>

typedef struct sweep {
    keyed *segments, *scratch;
    hull_block *blocks;
    uint32_t *units; // [N] kept at this point of the sweep
    uint64_t *total; // [parts] of the group
} sweep;

// Blocks of the group's heads over least .. most, cheapest first; of equal slopes the lower head, and in it the last
// tokens first.
static size_t sort_blocks(const constrained_instance *x, sweep *w, uint32_t first, uint32_t n)
{
    size_t count = 0, units = x->curves.shape.n_tokens;
    for (uint32_t h = first; h < first + n; h++) {
        size_t blocks = pava_blocks(w->blocks, x->curves.gain + h * units + x->least[h], x->most[h] - x->least[h]);
        while (blocks-- > 0)
            w->segments[count++] = (keyed){key_from_double(w->blocks[blocks].slope), h, w->blocks[blocks].length};
    }
    radix_sort(w->segments, w->scratch, count, 64);
    return count;
}

static uint64_t drop(sweep *w, keyed *segment, uint64_t excess)
{
    uint32_t take = segment->b < excess ? segment->b : (uint32_t)excess;
    segment->b -= take;
    w->units[segment->a] -= take;
    return take;
}

static void sweep_group(solving *s, sweep *w, uint32_t group)
{
    const constrained_instance *x = &s->x;
    uint32_t n = solving_group_heads(s), first = group * n, all = shape_heads(&x->curves.shape);
    size_t count = sort_blocks(x, w, first, n);
    uint64_t kept = 0;
    for (uint32_t h = first; h < first + n; h++) w->units[h] = x->most[h];
    for (uint32_t i = 0; i < x->parts; i++) w->total[i] = solving_part_total(s, group * x->parts + i, w->units);
    for (size_t k = 0; k < count; k++) {
        uint32_t part = w->segments[k].a / x->own;
        uint64_t *total = &w->total[part - group * x->parts];
        if (*total <= x->cap[part] || w->segments[k].b == 0) continue;
        *total -= drop(w, &w->segments[k], *total - x->cap[part]);
        s->price[part] = double_from_key(w->segments[k].key);
    }
    for (uint32_t i = 0; i < x->parts; i++) kept += w->total[i];
    double lambda = 0;
    size_t k = 0;
    for (uint32_t row = 0; row < s->n_rows; row++) {
        size_t at = (size_t)row * x->n_groups + group;
        while (kept > s->budget[at] && k < count) {
            if (w->segments[k].b == 0) {
                k++;
                continue;
            }
            kept -= drop(w, &w->segments[k], kept - s->budget[at]);
            lambda = double_from_key(w->segments[k].key);
        }
        s->lambda[at] = lambda;
        memcpy(s->keep + (size_t)row * all + first, w->units + first, n * sizeof *w->units);
    }
}

kvb_status solving_sweep_rows(solving *s, kvb_error *err)
{
    const constrained_instance *x = &s->x;
    size_t units = x->curves.shape.n_tokens, cells = solving_group_heads(s) * units;
    sweep w = {.segments = malloc(cells * sizeof *w.segments),
               .scratch = malloc(cells * sizeof *w.scratch),
               .blocks = malloc(units * sizeof *w.blocks),
               .units = malloc(shape_heads(&x->curves.shape) * sizeof *w.units),
               .total = malloc(x->parts * sizeof *w.total)};
    bool ok = w.segments && w.scratch && w.blocks && w.units && w.total;
    for (uint32_t group = 0; ok && group < x->n_groups; group++) sweep_group(s, &w, group);
    free(w.segments);
    free(w.scratch);
    free(w.blocks);
    free(w.units);
    free(w.total);
    return ok ? KVB_OK : kvb_fail(err, KVB_MEMORY, "constraints: not enough memory for %zu choices", cells);
}
