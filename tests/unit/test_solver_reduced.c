// The reduced exact solution against the token-level DP, brute force, and a plain DP with limits for each head.
#include "solver/exact.h"
#include "solver/exact_core.h"
#include "solver/mckp.h"
#include "test_solver_cases.h"
#include <omp.h>

typedef struct solved_case {
    problem p;
    exact_result x;
    double ratios[TABLE_ROWS];
    double tolerance;
} solved_case;

static void solve_curves(solved_case *s, const cache_shape *shape, solve_scope scope)
{
    kvb_error err = {0};
    must(problem_solve(&s->p, &err), &err);
    must(exact_init(&s->x, shape, scope, TABLE_ROWS, &err), &err);
    must(exact_solve(&s->x, &s->p.curves, &s->p.allocation, NULL, &err), &err);
    s->tolerance = 1e-12 * (s->p.curves.total + 1e-300);
}

static void solve_case(solved_case *s, case_kind kind, const cache_shape *shape, solve_scope scope, hull_range hull)
{
    kvb_error err = {0};
    table_ratios(s->ratios);
    must(problem_init(&s->p, shape, &(solve_options){hull, scope, s->ratios, TABLE_ROWS, NULL}, &err), &err);
    loss_curves_free(&s->p.curves);
    case_curves(&s->p.curves, kind, shape);
    solve_curves(s, shape, scope);
}

static void free_case(solved_case *s)
{
    exact_free(&s->x);
    problem_free(&s->p);
}

static uint64_t total_kept(const uint32_t *keep, uint32_t n)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += keep[i];
    return sum;
}

// One layer's curves as a problem of its own.
static void layer_curves(loss_curves *out, const loss_curves *c, uint32_t layer)
{
    kvb_error err = {0};
    cache_shape shape = c->shape;
    size_t cells = (size_t)shape.n_kv_heads * shape_middle(&shape);
    shape.n_layers = 1;
    must(loss_curves_init(out, &shape, &err), &err);
    memcpy(out->gain, c->gain + layer * cells, cells * sizeof *out->gain);
    loss_curves_sum(out);
}

// Optimum of every row by the full DP, layer by layer in that scope.
static void judge(const solved_case *s, double optimum[TABLE_ROWS])
{
    kvb_error err = {0};
    uint32_t groups = s->x.n_groups, n = s->x.n_heads / groups;
    for (int r = 0; r < TABLE_ROWS; r++) optimum[r] = 0;
    for (uint32_t g = 0; g < groups; g++) {
        loss_curves own = s->p.curves;
        mckp m;
        if (groups > 1) layer_curves(&own, &s->p.curves, g);
        must(mckp_tokens(&m, &own, NULL, &err), &err);
        for (int r = 0; r < TABLE_ROWS; r++) {
            double loss;
            uint64_t budget = total_kept(s->p.allocation.keep + (size_t)r * s->x.n_heads + g * n, n);
            must(mckp_budgets(&m, budget, NULL, &loss, &err), &err);
            optimum[r] += loss;
        }
        mckp_free(&m);
        if (groups > 1) loss_curves_free(&own);
    }
}

static void check_budgets(const solved_case *s, int r)
{
    const exact_result *x = &s->x;
    const loss_curves *c = &s->p.curves;
    const uint32_t *keep = x->keep + (size_t)r * x->n_heads, *greedy = s->p.allocation.keep + (size_t)r * x->n_heads;
    uint32_t n = x->n_heads / x->n_groups;
    for (uint32_t h = 0; h < x->n_heads; h++) ck_assert(keep[h] >= c->floor && keep[h] <= c->shape.n_tokens);
    for (uint32_t g = 0; g < x->n_groups; g++)
        ck_assert_uint_eq(total_kept(keep + g * n, n), total_kept(greedy + g * n, n));
    double loss = 0;
    for (uint32_t h = 0; h < x->n_heads; h++) loss += loss_at(c, h, keep[h]);
    ck_assert(fabs(loss - x->optimum[r]) <= s->tolerance);
}

// bound <= optimum <= greedy <= bound + gap of the hulls, at every ratio; optimum = the DP's.
static int check_rows(const solved_case *s, case_kind kind, bool feasible)
{
    double optimum[TABLE_ROWS];
    int better = 0;
    judge(s, optimum);
    for (int r = 0; r < TABLE_ROWS; r++) {
        const exact_result *x = &s->x;
        ck_assert_uint_eq(x->proved[r], 1);
        check_budgets(s, r);
        ck_assert_msg(fabs(x->optimum[r] - optimum[r]) <= s->tolerance, "kind %d row %d: %.17g, DP %.17g", kind, r,
                      x->optimum[r], optimum[r]);
        ck_assert(x->bound[r] <= x->optimum[r] && x->optimum[r] <= x->greedy[r] + s->tolerance);
        if (feasible) {
            double gap = hulls_gap(&s->p.hulls, &s->p.curves, s->p.allocation.keep + (size_t)r * x->n_heads);
            ck_assert(x->greedy[r] <= x->bound[r] + gap + s->tolerance);
            ck_assert(fabs(x->bound[r] - s->p.bound[r] * s->p.curves.total) <= s->tolerance);
        }
        if (kind == CASE_PERFECT || kind == CASE_ZERO || kind == CASE_CONSTANT)
            ck_assert(x->greedy[r] - x->bound[r] <= s->tolerance);
        better += x->optimum[r] < x->greedy[r] - 1e-6 * s->p.curves.total;
    }
    return better;
}

START_TEST(equals_token_dp)
{
    case_seed("reduced");
    int better = 0;
    for (int round = 0; round < 20 * CASE_KINDS; round++) {
        case_kind kind = (case_kind)(round % CASE_KINDS);
        cache_shape shape = case_shape();
        bool full = round % 5 == 4;
        solved_case s = {0};
        solve_case(&s, kind, &shape, round % 3 == 2 ? SCOPE_LAYER : SCOPE_GLOBAL, full ? HULL_FULL : HULL_FEASIBLE);
        better += check_rows(&s, kind, !full);
        free_case(&s);
    }
    printf("rows where greedy is not optimal: %d\n", better);
    ck_assert_int_gt(better, 100); // else the cases would be too easy to say anything
}
END_TEST

// The corners that a random draw may miss.
START_TEST(corners)
{
    case_seed("corners");
    const cache_shape shapes[] = {
        {1, 1, 200, 4, 1},  // one head
        {3, 2, 37, 4, 32},  // T = protected + 1
        {2, 3, 120, 4, 32}, // floor far above 1 %: saturated from 70 % on
        {1, 12, 60, 0, 0},  // nothing protected
        {12, 1, 60, 1, 1},  // one head per layer
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = 0; kind < CASE_KINDS; kind++)
            for (int scope = 0; scope < 2; scope++) {
                solved_case s = {0};
                solve_case(&s, (case_kind)kind, &shapes[i], (solve_scope)scope, HULL_FEASIBLE);
                check_rows(&s, (case_kind)kind, true);
                if (i == 2) ck_assert_uint_eq(s.p.allocation.saturated[98], 1);
                free_case(&s);
            }
}
END_TEST

// methods.md 2.5: at 3 tokens greedy has 119, the optimum is 110.
START_TEST(known_gap)
{
    const double gains[16] = {30, 5, 25, 10, 2, 8, 12, 8, 16, 14, 12, 9, 9, 6, 2, 2};
    const double ratios[2] = {0.625, 0.8125}; // 10 and 13 of 16 tokens go
    solve_options options = {HULL_FEASIBLE, SCOPE_GLOBAL, ratios, 2, NULL};
    cache_shape shape = {1, 2, 8, 0, 0};
    problem p;
    exact_result x;
    kvb_error err = {0};
    must(problem_init(&p, &shape, &options, &err), &err);
    memcpy(p.curves.gain, gains, sizeof gains);
    loss_curves_sum(&p.curves);
    must(problem_solve(&p, &err), &err);
    must(exact_init(&x, &shape, SCOPE_GLOBAL, 2, &err), &err);
    must(exact_solve(&x, &p.curves, &p.allocation, NULL, &err), &err);
    ck_assert_double_eq(x.greedy[0], 68);
    ck_assert_double_eq(x.optimum[0], 68);
    ck_assert_double_eq(x.greedy[1], 119);
    ck_assert_double_eq(x.optimum[1], 110);
    ck_assert_double_eq(x.bound[1], 109);
    ck_assert_uint_eq(x.keep[2] + x.keep[3], 3);
    ck_assert_double_eq(loss_at(&p.curves, 0, x.keep[2]) + loss_at(&p.curves, 1, x.keep[3]), 110);
    exact_free(&x);
    problem_free(&p);
}
END_TEST

// Every way to split the budget, by counting.
static double brute(const loss_curves *c, uint32_t head, uint64_t budget)
{
    uint32_t n = shape_heads(&c->shape);
    double least = INFINITY;
    if (head == n) return budget == 0 ? 0 : INFINITY;
    for (uint32_t b = c->floor; b <= c->shape.n_tokens && b <= budget; b++) {
        double loss = loss_at(c, head, b) + brute(c, head + 1, budget - b);
        least = loss < least ? loss : least;
    }
    return least;
}

START_TEST(equals_brute_force)
{
    case_seed("brute");
    for (int round = 0; round < 3 * CASE_KINDS; round++) {
        cache_shape shape = {1 + case_below(2), 1 + case_below(2), 4 + case_below(5), case_below(2), case_below(2)};
        solved_case s = {0};
        solve_case(&s, (case_kind)(round % CASE_KINDS), &shape, SCOPE_GLOBAL, HULL_FEASIBLE);
        for (int r = 0; r < TABLE_ROWS; r += 7) {
            uint64_t budget = total_kept(s.x.keep + (size_t)r * s.x.n_heads, s.x.n_heads);
            ck_assert(fabs(brute(&s.p.curves, 0, budget) - s.x.optimum[r]) <= s.tolerance);
        }
        free_case(&s);
    }
}
END_TEST

// Optimum under limits by a plain DP.
static double limited(const loss_curves *c, const uint32_t *least, const uint32_t *cap, uint64_t budget)
{
    uint32_t n = shape_heads(&c->shape);
    size_t states = (size_t)n * c->shape.n_tokens + 1;
    double *value = malloc(states * sizeof *value), *next = malloc(states * sizeof *next), result;
    ck_assert(value && next);
    for (size_t x = 0; x < states; x++) value[x] = x == 0 ? 0 : INFINITY;
    for (uint32_t h = 0; h < n; h++) {
        for (size_t x = 0; x < states; x++) {
            next[x] = INFINITY;
            for (uint32_t b = least[h]; b <= cap[h] && b <= x; b++)
                next[x] = fmin(next[x], value[x - b] + loss_at(c, h, b));
        }
        double *swap = value;
        value = next;
        next = swap;
    }
    result = value[budget];
    free(value);
    free(next);
    return result;
}

// Any limits, any multiplier, any starting budgets.
START_TEST(limits_of_heads)
{
    case_seed("limits of heads");
    core_work *w = core_work_new();
    for (int round = 0; round < 60 * CASE_KINDS; round++) {
        uint32_t least[12], cap[12], start[12], keep[12], n;
        cache_shape shape = {1 + case_below(3), 1 + case_below(4), 0, case_below(2), case_below(3)};
        shape.n_tokens = shape_protected(&shape) + 1 + case_below(40);
        loss_curves c;
        case_curves(&c, (case_kind)(round % CASE_KINDS), &shape);
        n = shape_heads(&shape);
        for (uint32_t h = 0; h < n; h++) {
            least[h] = c.floor + case_below(shape.n_tokens - c.floor + 1) / 2;
            cap[h] = least[h] + case_below(shape.n_tokens - least[h] + 1);
            start[h] = least[h] + case_below(cap[h] - least[h] + 1);
        }
        core_problem p = {&c, 0, n, least, cap, start, 0, UINT64_MAX, 1 << 28};
        if (round % 4) p.lambda = c.total / (n * shape.n_tokens) * 2 * case_uniform();
        core_answer a;
        kvb_error err = {0};
        must(core_solve(w, &p, keep, &a, &err), &err);
        double loss = 0, best = limited(&c, least, cap, total_kept(start, n));
        for (uint32_t h = 0; h < n; h++) {
            ck_assert(keep[h] >= least[h] && keep[h] <= cap[h]);
            loss += loss_at(&c, h, keep[h]);
        }
        ck_assert(a.proved);
        ck_assert_uint_eq(total_kept(keep, n), total_kept(start, n));
        ck_assert_msg(fabs(loss - best) <= 1e-12 * (c.total + 1e-300), "round %d: %.17g, DP %.17g", round, loss, best);
        loss_curves_free(&c);
    }
    core_work_free(w);
}
END_TEST

// A size at which threads take turns: the same bytes from one thread and from three.
START_TEST(threads_do_not_matter)
{
    case_seed("threads");
    int before = omp_get_max_threads();
    cache_shape shape = {10, 3, 1200, 4, 32};
    solved_case s = {0};
    solve_case(&s, CASE_HEAVY, &shape, SCOPE_LAYER, HULL_FEASIBLE);
    exact_result again;
    kvb_error err = {0};
    omp_set_num_threads(before == 1 ? 3 : 1);
    must(exact_init(&again, &shape, SCOPE_LAYER, TABLE_ROWS, &err), &err);
    must(exact_solve(&again, &s.p.curves, &s.p.allocation, NULL, &err), &err);
    omp_set_num_threads(before);
    ck_assert_mem_eq(again.keep, s.x.keep, sizeof *again.keep * TABLE_ROWS * 30);
    ck_assert_mem_eq(again.bound, s.x.bound, sizeof *again.bound * TABLE_ROWS);
    ck_assert_uint_eq(again.work, s.x.work);
    exact_free(&again);
    free_case(&s);
}
END_TEST

// Beyond the limits greedy's budgets are kept, and said to be unproved.
START_TEST(limits_are_kept)
{
    case_seed("limits");
    cache_shape shape = {2, 3, 300, 4, 1};
    kvb_error err = {0};
    solved_case s = {0};
    solve_case(&s, CASE_HEAVY, &shape, SCOPE_GLOBAL, HULL_FEASIBLE);
    const exact_limits tight[] = {{.max_work = 1}, {.max_bytes = 8}};
    for (int i = 0; i < 2; i++) {
        exact_result x;
        int unproved = 0;
        must(exact_init(&x, &shape, SCOPE_GLOBAL, TABLE_ROWS, &err), &err);
        must(exact_solve(&x, &s.p.curves, &s.p.allocation, &tight[i], &err), &err);
        for (int r = 0; r < TABLE_ROWS; r++) {
            unproved += !x.proved[r];
            if (!x.proved[r]) ck_assert_mem_eq(x.keep + r * 6, s.p.allocation.keep + r * 6, 6 * sizeof *x.keep);
            ck_assert(fabs(x.bound[r] - s.x.bound[r]) <= s.tolerance);
        }
        ck_assert_int_gt(unproved, 10);
        exact_free(&x);
    }
    free_case(&s);
}
END_TEST

START_TEST(wrong_arguments_are_refused)
{
    case_seed("wrong");
    cache_shape shape = {1, 2, 50, 1, 1}, other = {1, 3, 50, 1, 1};
    kvb_error err = {0};
    solved_case s = {0};
    exact_result x;
    solve_case(&s, CASE_RANDOM, &shape, SCOPE_GLOBAL, HULL_FEASIBLE);
    must(exact_init(&x, &other, SCOPE_GLOBAL, TABLE_ROWS, &err), &err);
    ck_assert_int_eq(exact_solve(&x, &s.p.curves, &s.p.allocation, NULL, &err), KVB_ARGUMENT);
    exact_free(&x);
    s.p.allocation.keep[0] = 51;
    ck_assert_int_eq(exact_solve(&s.x, &s.p.curves, &s.p.allocation, NULL, &err), KVB_ARGUMENT);
    ck_assert_int_eq(exact_init(&x, &shape, SCOPE_GLOBAL, 0, &err), KVB_ARGUMENT);
    ck_assert_ptr_null(x.keep);
    free_case(&s);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, equals_token_dp);
    tcase_add_test(tc, corners);
    tcase_add_test(tc, known_gap);
    tcase_add_test(tc, equals_brute_force);
    tcase_add_test(tc, limits_of_heads);
    tcase_add_test(tc, threads_do_not_matter);
    tcase_add_test(tc, limits_are_kept);
    tcase_add_test(tc, wrong_arguments_are_refused);
}

UNIT_MAIN("solver_reduced", fill)
