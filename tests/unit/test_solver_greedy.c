// The sweep over sorted blocks, compared with a judge that drops one token at a time.
#include "test_solver_cases.h"
#include <omp.h>

// Every head's next token in drop order, one heap entry per head, ordered by (gain, head).
typedef struct entry {
    double gain;
    uint32_t head;
} entry;

static bool before(entry a, entry b)
{
    return a.gain < b.gain || (a.gain == b.gain && a.head < b.head);
}

static void heap_push(entry *heap, size_t *n, entry e)
{
    size_t i = (*n)++;
    for (; i > 0 && before(e, heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = e;
}

static entry heap_pop(entry *heap, size_t *n)
{
    entry top = heap[0], last = heap[--*n];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < *n; i = child) {
        if (child + 1 < *n && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

// The published loop: pop the cheapest token, and leave its head out once the head is at the floor. gain [N, T] goes by
// kept count: gain[b - 1] is what the b-th kept token of a head is worth on the hull.
static void judge(uint32_t *keep, const double *gain, uint32_t first, uint32_t layers, uint32_t heads, uint32_t t,
                  uint32_t floor_tokens, uint32_t rows, const double *ratios, uint32_t stride)
{
    uint32_t n = layers * heads;
    entry *heap = malloc(n * sizeof *heap);
    uint32_t *now = malloc(n * sizeof *now);
    size_t size = 0;
    uint64_t gone = 0;
    for (uint32_t i = 0; i < n; i++) {
        now[i] = t;
        if (t > floor_tokens) heap_push(heap, &size, (entry){gain[(size_t)(first + i) * t + t - 1], first + i});
    }
    for (uint32_t r = 0; r < rows; r++) {
        for (uint64_t target = (uint64_t)rint(ratios[r] * layers * heads * t); gone < target && size > 0; gone++) {
            uint32_t head = heap_pop(heap, &size).head, b = --now[head - first];
            if (b > floor_tokens) heap_push(heap, &size, (entry){gain[(size_t)head * t + b - 1], head});
        }
        memcpy(keep + (size_t)r * stride + first, now, n * sizeof *now);
    }
    free(heap);
    free(now);
}

// Returns the hulls' gains by kept count. Protected tokens and those below the hull's start are never dropped before
// the floor, so they stay 0.
static double *expand(const loss_curves *c, const hulls *h)
{
    uint32_t t = c->shape.n_tokens, p = shape_protected(&c->shape);
    double *gain = calloc((size_t)h->n_heads * t, sizeof *gain);
    for (uint32_t n = 0; n < h->n_heads; n++) {
        double *to = gain + (size_t)n * t + p + h->first;
        for (uint32_t k = 0; k < h->count[n]; k++)
            for (uint32_t i = 0; i < h->block[(size_t)n * h->stride + k].length; i++)
                *to++ = h->block[(size_t)n * h->stride + k].slope;
        ck_assert_ptr_eq(to, gain + (size_t)(n + 1) * t);
    }
    return gain;
}

static void check_invariants(const problem *p)
{
    const allocation *a = &p->allocation;
    const cache_shape *s = &p->curves.shape;
    uint32_t n = a->n_heads, per_group = n / a->n_groups;
    for (uint32_t r = 0; r < a->n_rows; r++) {
        const uint32_t *keep = a->keep + (size_t)r * n;
        for (uint32_t g = 0; g < a->n_groups; g++) {
            uint64_t kept = 0, size = (uint64_t)per_group * s->n_tokens;
            uint64_t target = prune_target(p->options.ratios[r], s->n_layers / a->n_groups, s->n_kv_heads, s->n_tokens);
            for (uint32_t i = 0; i < per_group; i++) kept += keep[g * per_group + i];
            if (!a->saturated[r]) ck_assert_uint_eq(kept, size - target);
            else ck_assert_uint_ge(kept, size - target);
        }
        for (uint32_t i = 0; i < n; i++) {
            ck_assert(keep[i] >= p->curves.floor && keep[i] <= s->n_tokens);
            if (r > 0) ck_assert_uint_le(keep[i], keep[i - (size_t)n]); // nested
        }
        if (a->saturated[r] && a->n_groups == 1)
            for (uint32_t i = 0; i < n; i++) ck_assert_uint_eq(keep[i], p->curves.floor);
    }
}

// With the feasible hull, at most one head of a group stops inside a block.
static void check_one_inside(const problem *p)
{
    const allocation *a = &p->allocation;
    uint32_t n = a->n_heads, protect = shape_protected(&p->curves.shape);
    for (uint32_t r = 0; r < a->n_rows; r++)
        for (uint32_t g = 0; g < a->n_groups; g++) {
            int inside = 0;
            for (uint32_t i = g * (n / a->n_groups); i < (g + 1) * (n / a->n_groups); i++) {
                uint32_t at = protect + p->hulls.first, k = 0, kept = a->keep[(size_t)r * n + i];
                while (at < kept) at += p->hulls.block[(size_t)i * p->hulls.stride + k++].length;
                inside += at != kept;
            }
            ck_assert_int_le(inside, 1);
        }
}

static void solve_case(case_kind kind, hull_range range, solve_scope scope)
{
    cache_shape shape = case_shape();
    problem p;
    case_solved(&p, kind, &shape, scope, range);
    uint32_t n = shape_heads(&shape), groups = p.allocation.n_groups;
    uint32_t *expected = malloc((size_t)TABLE_ROWS * n * sizeof *expected);
    double *gain = expand(&p.curves, &p.hulls);
    for (uint32_t g = 0; g < groups; g++)
        judge(expected, gain, g * (n / groups), shape.n_layers / groups, shape.n_kv_heads, shape.n_tokens,
              p.curves.floor, TABLE_ROWS, p.options.ratios, n);
    ck_assert_mem_eq(expected, p.allocation.keep, (size_t)TABLE_ROWS * n * sizeof *expected);
    check_invariants(&p);
    if (range == HULL_FEASIBLE) check_one_inside(&p);
    free(expected);
    free(gain);
    problem_free(&p);
}

UNIT_TEST(sweep_equals_one_token_heap)
{
    for (int round = 0; round < 60; round++)
        for (int kind = 0; kind < CASE_KINDS; kind++)
            for (int way = 0; way < 4; way++)
                solve_case((case_kind)kind, way & 1 ? HULL_FULL : HULL_FEASIBLE, way & 2 ? SCOPE_LAYER : SCOPE_GLOBAL);
}

UNIT_TEST(saturated_rows_stay_at_the_floor)
{
    cache_shape shape = {2, 3, 1024, 4, 32};
    problem p;
    case_solved(&p, CASE_HEAVY, &shape, SCOPE_GLOBAL, HULL_FEASIBLE);
    check_invariants(&p);
    for (int r = 0; r < TABLE_ROWS; r++) { // 1 - 36/1024 = 0.965
        ck_assert_int_eq(p.allocation.saturated[r], r >= 96);
        if (r < 96) continue;
        ck_assert_double_eq_tol(p.bound[r], p.loss[r], 1e-12); // nothing else is feasible, so this is the optimum
        ck_assert_double_eq_tol(p.loss[r], p.loss[97], 1e-15);
    }
    problem_free(&p);
}

UNIT_TEST(any_list_of_ratios)
{
    const double ratios[] = {0, 0, 0.123, 0.5, 0.5, 0.875, 1}, wrong[] = {0.5, 0.4}, nan_ratio[] = {NAN},
                 above[] = {1.01};
    cache_shape shape = {2, 2, 60, 2, 3};
    problem p;
    problem_init(&p, &shape, &(solve_options){HULL_FEASIBLE, SCOPE_LAYER, ratios, 7, NULL});
    loss_curves_free(&p.curves);
    case_curves(&p.curves, CASE_RANDOM, &shape);
    help_ok(problem_solve(&p, err));
    check_invariants(&p);
    for (int i = 0; i < 4; i++) ck_assert_uint_eq(p.allocation.keep[i], 60);
    ck_assert_double_eq(p.loss[0], 0);
    ck_assert_int_eq(p.allocation.saturated[6], 1);
    allocation two, one;
    allocation_init(&two, &shape, SCOPE_GLOBAL, 2);
    allocation_init(&one, &shape, SCOPE_GLOBAL, 1);
    help_fails(greedy_sweep(&two, &p.curves, &p.hulls, wrong, err), KVB_ARGUMENT, "");
    help_fails(greedy_sweep(&one, &p.curves, &p.hulls, nan_ratio, err), KVB_ARGUMENT, "");
    help_fails(greedy_sweep(&one, &p.curves, &p.hulls, above, err), KVB_ARGUMENT, "");
    allocation_free(&one);
    allocation_free(&two);
    problem_free(&p);
    help_ok(prune_ratios_check(ratios, 7, err));
}

UNIT_TEST(targets_are_rounded_as_published)
{
    ck_assert_uint_eq(prune_target(0.01, 30, 3, 4125), 3712); // 3712.5
    ck_assert_uint_eq(prune_target(0.03, 30, 3, 4125), (uint64_t)rint(0.03 * 30 * 3 * 4125));
    ck_assert_uint_eq(prune_target(0.5, 1, 3, 5), 8);               // 7.5: half to even
    ck_assert_uint_eq(prune_target(0.99, 32, 8, 131072), 33218888); // 33218887.68
    unit_numbers(prune_target(0, 30, 3, 4125), 0, prune_target(1, 30, 3, 4125), 371250);
}

// Large enough to be divided among threads; their number must not change a bit.
UNIT_TEST(threads_change_nothing)
{
    double ratios[TABLE_ROWS];
    table_ratios(ratios);
    cache_shape shape = {10, 3, 7000, 4, 1};
    size_t cells = (size_t)TABLE_ROWS * shape_heads(&shape), n = (size_t)shape_heads(&shape) * shape.n_tokens;
    ck_assert_uint_gt(n, PARALLEL_CELLS);
    float *scores = malloc(n * sizeof *scores), *oracle = malloc(n * sizeof *oracle);
    case_arrays(CASE_HEAVY, &shape, scores, oracle);
    problem p[2];
    metric_order order[2];
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i == 0 ? 1 : 3);
        help_ok(metric_order_make(&order[i], &shape, scores, err));
        problem_init(&p[i], &shape, &(solve_options){HULL_FULL, SCOPE_GLOBAL, ratios, TABLE_ROWS, NULL});
        help_ok(loss_curves_fill(&p[i].curves, &order[i], oracle, err));
        help_ok(problem_solve(&p[i], err));
        p[i].options.hull = HULL_FEASIBLE;
        help_ok(problem_solve(&p[i], err));
    }
    ck_assert_mem_eq(order[0].position, order[1].position, n / 7000 * 6995 * sizeof *order[0].position);
    ck_assert_mem_eq(p[0].allocation.keep, p[1].allocation.keep, cells * sizeof *p[0].allocation.keep);
    ck_assert(memcmp(p[0].loss, p[1].loss, TABLE_ROWS * sizeof *p[0].loss) == 0);
    ck_assert(memcmp(p[0].bound, p[1].bound, TABLE_ROWS * sizeof *p[0].bound) == 0);
    check_invariants(&p[1]);
    oracle[n - 1] = -1;
    help_fails(loss_curves_fill(&p[1].curves, &order[1], oracle, err), KVB_NUMERIC, "layer 9, KV head 2, token 6999");
    for (int i = 0; i < 2; i++) problem_free(&p[i]), metric_order_free(&order[i]);
    free(scores);
    free(oracle);
}

UNIT_MAIN_EACH("solver_greedy", case_seed, NULL)
