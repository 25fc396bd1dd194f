#include "solver/greedy.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "solver/radix.h"
#include <math.h>
#include <string.h>

uint64_t prune_target(double ratio, uint32_t n_layers, uint32_t n_kv_heads, uint32_t n_tokens)
{
    return (uint64_t)rint(ratio * n_layers * n_kv_heads * n_tokens);
}

kvb_status prune_ratios_check(const double *ratios, uint32_t n, kvb_error *err)
{
    for (uint32_t i = 0; i < n; i++)
        if (!(ratios[i] >= 0 && ratios[i] <= 1) || (i > 0 && ratios[i] < ratios[i - 1]))
            return kvb_fail(err, KVB_ARGUMENT, "solver: ratio %u: expected ascending prune ratios in [0, 1], found %g",
                            i, ratios[i]);
    return KVB_OK;
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

void allocation_init(allocation *a, const cache_shape *shape, solve_scope scope, uint32_t n_rows)
{
    size_t n = shape_heads(shape), groups = scope == SCOPE_LAYER ? shape->n_layers : 1;
    *a = (allocation){.n_rows = n_rows, .n_heads = (uint32_t)n, .n_groups = (uint32_t)groups};
    a->keep = need(n_rows * n, sizeof *a->keep, "budgets");
    a->lambda = need(n_rows * groups, sizeof *a->lambda, "multipliers");
    a->saturated = need(n_rows, 1, "ratios");
    sweep_work *w = a->work = need(1, sizeof *w, "sweeps");
    w->capacity = n * shape_middle(shape);
    w->current = need(n, sizeof *w->current, "budgets");
    w->segments = need_more(NULL, w->capacity, sizeof *w->segments, "blocks of hulls");
    w->scratch = need_more(NULL, w->capacity, sizeof *w->scratch, "blocks of hulls");
}

void allocation_free(allocation *a)
{
    sweep_work *w = a->work;
    if (w) free_all(w->current, w->segments, w->scratch);
    free_all(w, a->keep, a->lambda, a->saturated);
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
    kvb_status status = prune_ratios_check(ratios, a->n_rows, err);
    if (status != KVB_OK) return status;
    memset(a->saturated, 0, a->n_rows);
    for (uint32_t group = 0; group < a->n_groups; group++) sweep_group(a, c, h, ratios, group);
    return KVB_OK;
}
