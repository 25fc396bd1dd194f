#include "solver/greedy.h"
#include "runtime/fail.h"
#include "solver/radix.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

uint64_t prune_target(double ratio, uint32_t n_layers, uint32_t n_kv_heads, uint32_t n_tokens)
{
    return (uint64_t)rint(ratio * n_layers * n_kv_heads * n_tokens);
}

void table_ratios(double ratios[TABLE_ROWS])
{
    for (int i = 0; i < TABLE_ROWS; i++) ratios[i] = (i + 1) / 100.0;
}

typedef struct sweep_work {
    uint32_t *current; // [N] tokens that each head keeps at this point of the sweep
    keyed *segments;   // [N * M] key: slope, a: head, b: tokens
    keyed *scratch;    // [N * M]
    size_t capacity;
} sweep_work;

kvb_status allocation_init(allocation *a, const cache_shape *shape, solve_scope scope, uint32_t n_rows, kvb_error *err)
{
    *a = (allocation){0};
    kvb_status status = cache_shape_check(shape, err);
    if (status) return status;
    size_t n = shape_heads(shape), groups = scope == SCOPE_LAYER ? shape->n_layers : 1, cells, bytes;
    if (n_rows == 0 || __builtin_mul_overflow(n, (size_t)n_rows, &cells) ||
        __builtin_mul_overflow(cells, sizeof(double), &bytes))
        return kvb_fail(err, KVB_ARGUMENT,
                        "solver: %u ratios for %zu heads: expected at least one, and no more than fit", n_rows, n);
    *a = (allocation){.n_rows = n_rows, .n_heads = (uint32_t)n, .n_groups = (uint32_t)groups};
    a->keep = malloc(cells * sizeof *a->keep);
    a->lambda = malloc(n_rows * groups * sizeof *a->lambda);
    a->saturated = malloc(n_rows);
    sweep_work *w = a->work = calloc(1, sizeof *w);
    if (w) {
        w->capacity = n * shape_middle(shape);
        w->current = malloc(n * sizeof *w->current);
        w->segments = malloc(w->capacity * sizeof *w->segments);
        w->scratch = malloc(w->capacity * sizeof *w->scratch);
    }
    if (a->keep && a->lambda && a->saturated && w && w->current && w->segments && w->scratch) return KVB_OK;
    allocation_free(a);
    return kvb_fail(err, KVB_MEMORY, "solver: not enough memory to allocate over %zu heads at %u ratios", n, n_rows);
}

void allocation_free(allocation *a)
{
    sweep_work *w = a->work;
    if (w) {
        free(w->current);
        free(w->segments);
        free(w->scratch);
    }
    free(w);
    free(a->keep);
    free(a->lambda);
    free(a->saturated);
    *a = (allocation){0};
}

// All blocks of the heads first .. first + n - 1, cheapest first. They are laid out by head, each head's last tokens
// first; the sort is stable, so equal slopes stay in the order (layer, head, position from the end).
static size_t sort_segments(sweep_work *w, const hulls *h, uint32_t first, uint32_t n)
{
    size_t count = 0;
    for (uint32_t head = first; head < first + n; head++) {
        const hull_block *block = h->block + (size_t)head * h->stride;
        for (uint32_t k = h->count[head]; k-- > 0;)
            w->segments[count++] = (keyed){key_from_double(block[k].slope), head, block[k].length};
    }
    radix_sort(w->segments, w->scratch, count, 64);
    return count;
}

static void sweep_group(allocation *a, const loss_curves *c, const hulls *h, const double *ratios, uint32_t group)
{
    sweep_work *w = a->work;
    uint32_t n = a->n_heads / a->n_groups, first = group * n;
    size_t count = sort_segments(w, h, first, n), at = 0;
    uint64_t gone = 0;
    double lambda = 0;
    for (uint32_t i = first; i < first + n; i++) w->current[i] = c->shape.n_tokens;
    for (uint32_t row = 0; row < a->n_rows; row++) {
        uint64_t target =
            prune_target(ratios[row], c->shape.n_layers / a->n_groups, c->shape.n_kv_heads, c->shape.n_tokens);
        while (gone < target && at < count) {
            keyed *s = &w->segments[at];
            uint32_t room = w->current[s->a] - c->floor, take = s->b < room ? s->b : room;
            if (take > target - gone) take = (uint32_t)(target - gone);
            if (take == 0) { // the block is used up, or, with HULL_FULL, its head is at the floor
                at++;
                continue;
            }
            lambda = double_from_key(s->key);
            w->current[s->a] -= take;
            s->b -= take;
            gone += take;
        }
        memcpy(a->keep + (size_t)row * a->n_heads + first, w->current + first, n * sizeof *w->current);
        a->lambda[(size_t)row * a->n_groups + group] = lambda;
        a->saturated[row] |= gone < target;
    }
}

kvb_status greedy_sweep(allocation *a, const loss_curves *c, const hulls *h, const double *ratios, kvb_error *err)
{
    const sweep_work *w = a->work;
    if (!w || a->n_heads != shape_heads(&c->shape) || h->n_heads != a->n_heads ||
        h->stride != shape_middle(&c->shape) || w->capacity != (size_t)a->n_heads * h->stride)
        return kvb_fail(err, KVB_ARGUMENT, "solver: allocation, curves and hulls were made for different shapes");
    for (uint32_t i = 0; i < a->n_rows; i++)
        if (!(ratios[i] >= 0 && ratios[i] <= 1) || (i > 0 && ratios[i] < ratios[i - 1]))
            return kvb_fail(err, KVB_ARGUMENT, "solver: ratio %u: expected ascending prune ratios in [0, 1], found %g",
                            i, ratios[i]);
    memset(a->saturated, 0, a->n_rows);
    for (uint32_t group = 0; group < a->n_groups; group++) sweep_group(a, c, h, ratios, group);
    return KVB_OK;
}
