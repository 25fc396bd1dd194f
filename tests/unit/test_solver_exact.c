// Certificates, the exact solution and the checker against plain dynamic programs, brute force and numbers by hand.
#include "solver/certificate.h"
#include "solver/checker.h"
#include "solver/constrained.h"
#include "solver/exact.h"
#include "test_solver_cases.h"
#include <omp.h>

// ---- Judges ---------------------------------------------------------------------------------------------------------

// Returns the least loss of heads first .. first + n - 1 for each number of tokens that they keep together, [n T + 1],
// by a plain dynamic program; the caller frees it. least, most [n]: limits of each head, or NULL.
static double *optima(const loss_curves *c, uint32_t first, uint32_t n, const uint32_t *least, const uint32_t *most)
{
    uint32_t tokens = c->shape.n_tokens;
    size_t states = (size_t)n * tokens + 1;
    double *value = malloc(states * sizeof *value), *next = malloc(states * sizeof *next);
    ck_assert(value && next);
    for (size_t x = 0; x < states; x++) value[x] = x == 0 ? 0 : INFINITY;
    for (uint32_t h = 0; h < n; h++) {
        for (size_t x = 0; x < states; x++) next[x] = INFINITY;
        for (uint32_t b = least ? least[h] : c->floor; b <= (most ? most[h] : tokens); b++) {
            double loss = loss_at(c, first + h, b);
            for (size_t x = 0; x + b < states && x <= (size_t)h * tokens; x++)
                if (value[x] + loss < next[x + b]) next[x + b] = value[x] + loss;
        }
        double *swap = value;
        value = next;
        next = swap;
    }
    free(next);
    return value;
}

// Returns D(lambda) by its definition.
static double dual(const loss_curves *c, uint32_t first, uint32_t n, double lambda, uint64_t budget)
{
    double sum = -lambda * (double)budget;
    for (uint32_t h = first; h < first + n; h++) {
        double best = INFINITY;
        for (uint32_t b = c->floor; b <= c->shape.n_tokens; b++) best = fmin(best, loss_at(c, h, b) + lambda * b);
        sum += best;
    }
    return sum;
}

// ---- All rows of a problem ------------------------------------------------------------------------------------------

typedef struct solved_case {
    problem p;
    solved_rows x;
    double tolerance;
} solved_case;

static void solve_case(solved_case *s, case_kind kind, const cache_shape *shape, solve_scope scope, hull_range hull)
{
    case_solved(&s->p, kind, shape, scope, hull);
    help_ok(exact_solve(&s->x, &s->p.curves, &s->p.allocation, err));
    s->tolerance = 1e-12 * (s->p.curves.total + 1e-300);
}

static void free_case(solved_case *s)
{
    solved_rows_free(&s->x);
    problem_free(&s->p);
}

static void check_budgets(const solved_case *s, int r)
{
    const solved_rows *x = &s->x;
    const loss_curves *c = &s->p.curves;
    const uint32_t *keep = x->keep + (size_t)r * x->n_heads, *greedy = s->p.allocation.keep + (size_t)r * x->n_heads;
    uint32_t n = x->n_heads / s->p.allocation.n_groups;
    for (uint32_t h = 0; h < x->n_heads; h++) ck_assert(keep[h] >= c->floor && keep[h] <= c->shape.n_tokens);
    for (uint32_t g = 0; g < s->p.allocation.n_groups; g++)
        ck_assert_uint_eq(case_total(keep + g * n, n), case_total(greedy + g * n, n));
    ck_assert(fabs(certificate_loss(c, 0, x->n_heads, keep) - x->loss[r]) <= s->tolerance);
}

// The certificate's bound is D at greedy's multipliers, and any other multiplier gives a weaker one.
static void check_bound(const solved_case *s, int r)
{
    const allocation *a = &s->p.allocation;
    const loss_curves *c = &s->p.curves;
    uint32_t n = a->n_heads / a->n_groups;
    double bound = 0, weaker = 0, size = s->tolerance;
    for (uint32_t g = 0; g < a->n_groups; g++) {
        double lambda = a->lambda[(size_t)r * a->n_groups + g], other = lambda * 2 * case_uniform();
        uint64_t budget = case_total(a->keep + (size_t)r * a->n_heads + g * n, n);
        bound += dual(c, g * n, n, lambda, budget);
        weaker += dual(c, g * n, n, other, budget);
        size += 2e-12 * lambda * n * c->shape.n_tokens;
    }
    ck_assert(fabs(fmax(bound, 0) - s->p.bound[r] * c->total) <= size && weaker <= s->x.loss[r] + size);
}

// bound <= checker's <= optimum <= greedy at every ratio; optimum = the dynamic program's.
static int check_rows(const solved_case *s, case_kind kind, bool feasible)
{
    const solved_rows *x = &s->x;
    uint32_t n = x->n_heads / s->p.allocation.n_groups;
    int better = 0;
    double optimum[TABLE_ROWS] = {0}, proved[TABLE_ROWS], near[TABLE_ROWS];
    for (uint32_t g = 0; g < s->p.allocation.n_groups; g++) {
        double *judge = optima(&s->p.curves, g * n, n, NULL, NULL);
        for (int r = 0; r < TABLE_ROWS; r++)
            optimum[r] += judge[case_total(s->p.allocation.keep + (size_t)r * x->n_heads + g * n, n)];
        free(judge);
    }
    // The checker starts near each row's multiplier, or far from it.
    for (int r = 0; r < TABLE_ROWS; r++) near[r] = s->p.lambda[r] * s->p.curves.total * (kind % 2 ? 1 : 1e-9);
    checker_rows(&s->p.curves, s->p.allocation.n_groups > 1, TABLE_ROWS, s->p.options.ratios, near, proved);
    for (int r = 0; r < TABLE_ROWS; r++) {
        ck_assert_uint_eq(x->proved[r], 1);
        check_budgets(s, r);
        ck_assert_msg(fabs(x->loss[r] - optimum[r]) <= s->tolerance, "kind %d row %d: %.17g, DP %.17g", kind, r,
                      x->loss[r], optimum[r]);
        ck_assert(x->bound[r] <= x->loss[r] && x->loss[r] <= x->greedy[r] + s->tolerance);
        ck_assert(proved[r] >= x->bound[r] - 10 * s->tolerance && proved[r] <= x->loss[r] + 10 * s->tolerance);
        if (feasible && r % 7 == 0) check_bound(s, r);
        if (feasible) ck_assert(fabs(x->bound[r] - s->p.bound[r] * s->p.curves.total) <= s->tolerance);
        if (kind == CASE_PERFECT || kind == CASE_ZERO || kind == CASE_CONSTANT)
            ck_assert(x->greedy[r] - x->bound[r] <= s->tolerance);
        better += x->loss[r] < x->greedy[r] - 1e-6 * s->p.curves.total;
    }
    return better;
}

UNIT_TEST(bounds_optima_and_greedy)
{
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
    ck_assert_int_gt(better, 100); // else the cases would be too easy
}

// The corners that a random draw may miss.
UNIT_TEST(corners)
{
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

// methods.md 2.5: at 3 tokens greedy has 119, the optimum is 110, and D is largest at 15, the slope of the block that
// greedy stops in: 109 = 170 - 30 - 16 - 15.
UNIT_TEST(known_gap)
{
    const double gains[16] = {30, 5, 25, 10, 2, 8, 12, 8, 16, 14, 12, 9, 9, 6, 2, 2};
    const double ratios[2] = {0.625, 0.8125}; // 10 and 13 of 16 tokens go
    double proved[2];
    problem p;
    solved_rows x;
    problem_init(&p, &(cache_shape){1, 2, 8, 0, 0}, &(solve_options){HULL_FEASIBLE, SCOPE_GLOBAL, ratios, 2, NULL});
    memcpy(p.curves.gain, gains, sizeof gains);
    loss_curves_sum(&p.curves);
    help_ok(problem_solve(&p, err));
    help_ok(exact_solve(&x, &p.curves, &p.allocation, err));
    ck_assert_double_eq(x.greedy[0], 68);
    ck_assert_double_eq(x.loss[0], 68);
    ck_assert(p.allocation.keep[0] == 3 && p.allocation.keep[1] == 3);
    ck_assert(p.allocation.keep[2] == 2 && p.allocation.keep[3] == 1);
    ck_assert_double_eq(x.greedy[1], 119);
    ck_assert_double_eq(x.loss[1], 110);
    ck_assert_double_eq(x.bound[1], 109);
    ck_assert_uint_eq(x.keep[2] + x.keep[3], 3);
    ck_assert_double_eq(loss_at(&p.curves, 0, x.keep[2]) + loss_at(&p.curves, 1, x.keep[3]), 110);
    checker_rows(&p.curves, false, 2, ratios, NULL, proved);
    ck_assert_double_eq_tol(proved[1], 109, 1e-9);
    solved_rows_free(&x);
    problem_free(&p);
}

// Any limits, any multiplier, any starting budgets.
UNIT_TEST(limits_of_heads)
{
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
        core_solve(w, &p, keep, &a);
        double *judge = optima(&c, 0, n, least, cap), best = judge[case_total(start, n)];
        double loss = certificate_loss(&c, 0, n, keep);
        for (uint32_t h = 0; h < n; h++) ck_assert(keep[h] >= least[h] && keep[h] <= cap[h]);
        ck_assert(a.proved);
        ck_assert_uint_eq(case_total(keep, n), case_total(start, n));
        ck_assert_msg(fabs(loss - best) <= 1e-12 * (c.total + 1e-300), "round %d: %.17g, DP %.17g", round, loss, best);
        free(judge);
        loss_curves_free(&c);
    }
    core_work_free(w);
}

// A size at which threads take turns: one thread and three give the same bytes.
UNIT_TEST(threads_do_not_matter)
{
    int before = omp_get_max_threads();
    cache_shape shape = {10, 3, 1200, 4, 32};
    solved_case s = {0};
    solve_case(&s, CASE_HEAVY, &shape, SCOPE_LAYER, HULL_FEASIBLE);
    solved_rows again;
    omp_set_num_threads(before == 1 ? 3 : 1);
    help_ok(exact_solve(&again, &s.p.curves, &s.p.allocation, err));
    omp_set_num_threads(before);
    ck_assert_mem_eq(again.keep, s.x.keep, sizeof *again.keep * TABLE_ROWS * 30);
    ck_assert_mem_eq(again.bound, s.x.bound, sizeof *again.bound * TABLE_ROWS);
    ck_assert_uint_eq(again.work, s.x.work);
    solved_rows_free(&again);
    free_case(&s);
}

// Beyond the limits of work, the start is kept and reported as unproved.
UNIT_TEST(limits_of_work_are_kept)
{
    cache_shape shape = {2, 3, 300, 4, 1};
    problem p;
    core_work *w = core_work_new();
    case_solved(&p, CASE_HEAVY, &shape, SCOPE_GLOBAL, HULL_FEASIBLE);
    for (int i = 0; i < 2; i++) {
        int unproved = 0;
        for (int r = 0; r < TABLE_ROWS; r++) {
            const uint32_t *start = p.allocation.keep + r * 6;
            uint32_t keep[6];
            core_answer a;
            core_problem one = {&p.curves,         0, 6, NULL, NULL, start, p.allocation.lambda[r], i ? UINT64_MAX : 1,
                                i ? 8 : UINT64_MAX};
            core_solve(w, &one, keep, &a);
            unproved += !a.proved;
            if (!a.proved) ck_assert_mem_eq(keep, start, sizeof keep);
        }
        ck_assert_int_gt(unproved, 10);
    }
    core_work_free(w);
    problem_free(&p);
}

UNIT_TEST(wrong_arguments_are_refused)
{
    cache_shape shape = {1, 2, 400, 1, 1}, other = {1, 3, 400, 1, 1};
    problem p;
    solved_rows x;
    loss_curves c;
    double loss[2], bound[2];
    case_solved(&p, CASE_RANDOM, &shape, SCOPE_GLOBAL, HULL_FEASIBLE);
    case_curves(&c, CASE_RANDOM, &other);
    help_fails(exact_solve(&x, &c, &p.allocation, err), KVB_ARGUMENT, "");
    p.allocation.keep[0] = shape.n_tokens + 1;
    help_fails(exact_solve(&x, &p.curves, &p.allocation, err), KVB_ARGUMENT, "");
    const uint32_t keep[4] = {200, 200, 100, 100};
    const double falling[2] = {1, 0.5}, negative[2] = {-1, 0}, not_a_number[2] = {NAN, NAN}, good[2] = {0.5, 1};
    help_fails(certificate_rows(&p.curves, 2, 1, keep, falling, loss, bound, err), KVB_ARGUMENT, "");
    help_fails(certificate_rows(&p.curves, 2, 1, keep, negative, loss, bound, err), KVB_ARGUMENT, "");
    help_fails(certificate_rows(&p.curves, 2, 1, keep, not_a_number, loss, bound, err), KVB_ARGUMENT, "");
    help_fails(certificate_rows(&p.curves, 2, 3, keep, good, loss, bound, err), KVB_ARGUMENT, "");
    help_ok(certificate_rows(&p.curves, 2, 1, keep, good, loss, bound, err));
    // Curves that do not belong to the counts: a floor above what is kept makes the "bound" exceed the loss.
    const uint32_t low[2] = {2, 2};
    const double high[1] = {1e6};
    help_fails(certificate_rows(&p.curves, 1, 1, low, high, loss, bound, err), KVB_NUMERIC, "");
    loss_curves_free(&c);
    problem_free(&p);
}

// ---- Inputs that are allowed but say little: every solver must give a defined, certified result ---------------------

enum { MOST = 64 };

// Solves one context greedily, exactly and with pages of 2; bounds must hold. losses [rows] are the exact ones.
static void solve_all_ways(const cache_shape *shape, const float *scores, const float *oracle, double *losses)
{
    double ratios[TABLE_ROWS], bound[TABLE_ROWS];
    metric_order order;
    problem p;
    solved_rows x, rows;
    kvb_limits limits;
    table_ratios(ratios);
    help_ok(metric_order_make(&order, shape, scores, err));
    problem_init(&p, shape, &(solve_options){HULL_FEASIBLE, SCOPE_GLOBAL, ratios, TABLE_ROWS, NULL});
    help_ok(loss_curves_fill(&p.curves, &order, oracle, err));
    help_ok(problem_solve(&p, err));
    help_ok(exact_solve(&x, &p.curves, &p.allocation, err));
    help_ok(kvb_limits_init(&limits, shape->n_layers, shape->n_kv_heads, err));
    limits.block = 2;
    help_ok(constrained_solve(&rows, &p.curves, &limits, ratios, TABLE_ROWS, true, err));
    checker_rows(&p.curves, false, TABLE_ROWS, ratios, NULL, bound);
    for (int r = 0; r < TABLE_ROWS; r++) {
        ck_assert(isfinite(p.loss[r]) && isfinite(p.bound[r]) && isfinite(p.lambda[r]) && p.bound[r] <= p.loss[r]);
        ck_assert(x.proved[r] && x.loss[r] <= x.greedy[r] && rows.proved[r]);
        ck_assert(bound[r] <= x.loss[r] + 1e-12 * p.curves.total);
        ck_assert(isfinite(rows.loss[r]) && isfinite(rows.bound[r]) && rows.bound[r] <= rows.loss[r]);
        help_ok(constrained_check(&limits, shape->n_tokens, rows.keep + (size_t)r * rows.n_heads, err));
        losses[r] = x.loss[r];
    }
    solved_rows_free(&rows);
    rows = solved_rows_make(2, 3);
    ck_assert(rows.n_rows == 2 && rows.keep[5] == 0 && rows.loss[1] == 0 && rows.proved[1] == 0);
    solved_rows_free(&rows);
    ck_assert_ptr_null(rows.keep);
    kvb_limits_free(&limits);
    solved_rows_free(&x);
    problem_free(&p);
    metric_order_free(&order);
}

UNIT_TEST(little_is_said)
{
    static const cache_shape shapes[] = {{1, 1, 2, 0, 1}, {1, 1, 40, 2, 4}, {2, 2, 7, 2, 4}, {2, 3, 20, 0, 0}};
    float scores[6 * MOST], oracle[6 * MOST];
    double losses[TABLE_ROWS];
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int kind = 0; kind < 5; kind++) {
            size_t n = (size_t)shape_heads(&shapes[s]) * shapes[s].n_tokens;
            for (size_t i = 0; i < n; i++) {
                scores[i] = kind == 1   ? (float)(i % 2 ? INFINITY : -INFINITY)
                            : kind == 2 ? (float)i
                                        : 1;                            // ties in all but 2
                oracle[i] = kind == 0   ? 0                             // nothing to lose
                            : kind == 3 ? (i == n / 2 ? 1e30f : 1e-30f) // one token is everything
                            : kind == 4 ? 1e-45f                        // the smallest number there is
                                        : 0.25f;
            }
            solve_all_ways(&shapes[s], scores, oracle, losses);
            for (int r = 0; kind == 0 && r < TABLE_ROWS; r++) ck_assert(losses[r] == 0);
            for (int r = 1; r < TABLE_ROWS; r++) ck_assert(losses[r] >= losses[r - 1]);
        }
}

UNIT_MAIN_EACH("solver_exact", case_seed, NULL)
