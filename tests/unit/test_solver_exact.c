// Certificates and the exact dynamic programs: bound <= optimum <= greedy <= bound + gap of the hull, and the optimum
// by brute force.
#include "solver/mckp.h"
#include "test_solver_cases.h"

static void solved(problem *p, case_kind kind, const cache_shape *shape, solve_scope scope, double *ratios)
{
    kvb_error err = {0};
    table_ratios(ratios);
    must(problem_init(p, shape, &(solve_options){HULL_FEASIBLE, scope, ratios, TABLE_ROWS, NULL}, &err), &err);
    loss_curves_free(&p->curves);
    case_curves(&p->curves, kind, shape);
    must(problem_solve(p, &err), &err);
}

static uint64_t total_kept(const uint32_t *keep, uint32_t n)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += keep[i];
    return sum;
}

START_TEST(bound_optimum_greedy_are_in_order)
{
    case_seed("chain");
    int vertices = 0, gaps = 0;
    for (int round = 0; round < 12 * CASE_KINDS; round++) {
        case_kind kind = (case_kind)(round % CASE_KINDS);
        cache_shape shape = case_shape();
        double ratios[TABLE_ROWS], tolerance;
        problem p;
        mckp exact;
        kvb_error err = {0};
        solved(&p, kind, &shape, SCOPE_GLOBAL, ratios);
        must(mckp_tokens(&exact, &p.curves, NULL, &err), &err);
        tolerance = 1e-12 * (p.curves.total + 1e-300);
        uint32_t n = shape_heads(&shape), *keep = malloc(n * sizeof *keep);
        for (int r = 0; r < TABLE_ROWS; r++) {
            const uint32_t *greedy = p.allocation.keep + (size_t)r * n;
            double optimum, loss = p.loss[r] * p.curves.total, bound = p.bound[r] * p.curves.total;
            uint64_t budget = total_kept(greedy, n);
            must(mckp_budgets(&exact, budget, keep, &optimum, &err), &err);
            ck_assert_uint_le(total_kept(keep, n), budget);
            ck_assert(fabs(certificate_loss(&p.curves, 0, n, keep) - optimum) <= tolerance);
            ck_assert(fabs(certificate_loss(&p.curves, 0, n, greedy) - loss) <= tolerance);
            ck_assert(bound <= optimum + tolerance);
            ck_assert(optimum <= loss + tolerance);
            double gap = hulls_gap(&p.hulls, &p.curves, greedy);
            ck_assert(loss <= bound + gap + tolerance);
            if (gap == 0) ck_assert(loss <= optimum + tolerance); // every head on a vertex: proved optimal
            if (kind == CASE_PERFECT) ck_assert(loss - bound <= tolerance);
            vertices += gap == 0;
            gaps += loss > optimum + 1e-6 * p.curves.total;
            // Any other multiplier is a weaker bound, never a wrong one.
            for (int k = 0; k < 3; k++) {
                double lambda = p.allocation.lambda[r] * (k == 0 ? 0 : 2 * case_uniform());
                double weaker = certificate_bound(&p.curves, 0, n, lambda, budget);
                ck_assert(weaker <= optimum + tolerance + 1e-12 * lambda * n * shape.n_tokens);
                ck_assert(weaker <= bound + tolerance + 1e-12 * lambda * n * shape.n_tokens);
            }
        }
        free(keep);
        mckp_free(&exact);
        problem_free(&p);
    }
    printf("rows with every head on a vertex: %d, rows where greedy is not optimal: %d\n", vertices, gaps);
    ck_assert_int_gt(vertices, 0);
    ck_assert_int_gt(gaps, 0); // else the cases would be too easy to say anything
}
END_TEST

START_TEST(rows_equal_single_bounds)
{
    case_seed("rows");
    for (int round = 0; round < 10 * CASE_KINDS; round++) {
        cache_shape shape = case_shape();
        double ratios[TABLE_ROWS];
        problem p;
        solved(&p, (case_kind)(round % CASE_KINDS), &shape, round % 2 ? SCOPE_LAYER : SCOPE_GLOBAL, ratios);
        uint32_t n = shape_heads(&shape), groups = p.allocation.n_groups, per_group = n / groups;
        for (int r = 0; r < TABLE_ROWS; r++) {
            double loss = 0, bound = 0, size = 1e-12 * p.curves.total;
            for (uint32_t g = 0; g < groups; g++) {
                const uint32_t *keep = p.allocation.keep + (size_t)r * n + g * per_group;
                double lambda = p.allocation.lambda[(size_t)r * groups + g];
                loss += certificate_loss(&p.curves, g * per_group, per_group, keep);
                bound += certificate_bound(&p.curves, g * per_group, per_group, lambda, total_kept(keep, per_group));
                size += 1e-12 * lambda * per_group * shape.n_tokens;
            }
            ck_assert(fabs(p.loss[r] * p.curves.total - loss) <= size);
            ck_assert(fabs(p.bound[r] * p.curves.total - bound) <= size);
        }
        problem_free(&p);
    }
}
END_TEST

// A perfect metric gives convex curves: hull and curve are one, and greedy is optimal at every ratio.
START_TEST(perfect_metric_has_no_gap)
{
    case_seed("perfect");
    cache_shape shape = {3, 2, 300, 4, 8};
    double ratios[TABLE_ROWS];
    problem p;
    solved(&p, CASE_PERFECT, &shape, SCOPE_GLOBAL, ratios);
    for (int r = 0; r < TABLE_ROWS; r++) ck_assert(p.loss[r] - p.bound[r] <= 1e-12);
    problem_free(&p);
}
END_TEST

START_TEST(broken_rows_are_refused)
{
    double ratios[TABLE_ROWS], loss[2], bound[2];
    cache_shape shape = {1, 2, 400, 1, 1};
    problem p;
    kvb_error err = {0};
    case_seed("broken");
    solved(&p, CASE_RANDOM, &shape, SCOPE_GLOBAL, ratios);
    const uint32_t keep[4] = {200, 200, 100, 100};
    const double falling[2] = {1, 0.5}, negative[2] = {-1, 0}, not_a_number[2] = {NAN, NAN}, good[2] = {0.5, 1};
    ck_assert_int_eq(certificate_rows(&p.curves, 2, 1, keep, falling, loss, bound, &err), KVB_ARGUMENT);
    ck_assert_int_eq(certificate_rows(&p.curves, 2, 1, keep, negative, loss, bound, &err), KVB_ARGUMENT);
    ck_assert_int_eq(certificate_rows(&p.curves, 2, 1, keep, not_a_number, loss, bound, &err), KVB_ARGUMENT);
    ck_assert_int_eq(certificate_rows(&p.curves, 2, 3, keep, good, loss, bound, &err), KVB_ARGUMENT);
    must(certificate_rows(&p.curves, 2, 1, keep, good, loss, bound, &err), &err);
    // Curves that do not belong to the counts: a floor above what is kept makes the "bound" exceed the loss.
    const uint32_t low[2] = {2, 2};
    const double high[1] = {1e6};
    ck_assert_int_eq(certificate_rows(&p.curves, 1, 1, low, high, loss, bound, &err), KVB_NUMERIC);
    problem_free(&p);
}
END_TEST

// methods.md 2.5, the optimum of test_solver_greedy.c's known_gap.
START_TEST(known_optimum)
{
    const double gains[16] = {30, 5, 25, 10, 2, 8, 12, 8, 16, 14, 12, 9, 9, 6, 2, 2};
    loss_curves c;
    mckp m;
    kvb_error err = {0};
    uint32_t keep[2];
    double loss;
    case_by_hand(&c, 1, 2, 8, gains);
    must(mckp_tokens(&m, &c, NULL, &err), &err);
    must(mckp_budgets(&m, 3, keep, &loss, &err), &err);
    ck_assert_double_eq(loss, 110);
    ck_assert(keep[0] + keep[1] == 3 && certificate_loss(&c, 0, 2, keep) == 110);
    must(mckp_budgets(&m, 6, keep, &loss, &err), &err);
    ck_assert_double_eq(loss, 68);
    must(mckp_budgets(&m, 1000, keep, &loss, &err), &err);
    ck_assert(loss == 0 && keep[0] == 8 && keep[1] == 8);
    mckp_free(&m);
    loss_curves_free(&c);
}
END_TEST

// All choice vectors by counting; the smallest vector, last head first, wins ties.
static double brute(const double *cost, uint32_t n, uint32_t k, uint32_t budget, uint32_t *best)
{
    uint32_t pick[5] = {0}, total = 0;
    double least = INFINITY;
    for (;;) {
        double sum = 0;
        for (uint32_t i = 0; i < n; i++) sum += cost[i * k + pick[i]];
        bool smaller = sum < least;
        if (!smaller && sum == least)
            for (uint32_t i = n; i-- > 0;)
                if (pick[i] != best[i]) {
                    smaller = pick[i] < best[i];
                    break;
                }
        if (total == budget && smaller) {
            least = sum;
            memcpy(best, pick, n * sizeof *best);
        }
        uint32_t i = 0;
        for (; i < n && pick[i] == k - 1; i++) {
            total -= pick[i];
            pick[i] = 0;
        }
        if (i == n) return least;
        pick[i]++;
        total++;
    }
}

START_TEST(dp_equals_brute_force)
{
    case_seed("brute");
    for (int round = 0; round < 200; round++) {
        uint32_t n = 1 + case_below(4), k = 1 + case_below(6);
        double cost[30];
        // Eighths add exactly, so that equal sums are equal numbers.
        for (uint32_t i = 0; i < n * k; i++) cost[i] = case_below(round % 3 ? 4 : 100) / 8.0;
        mckp m;
        kvb_error err = {0};
        must(mckp_solve(&m, cost, n, k, NULL, &err), &err);
        for (uint32_t budget = 0; budget <= n * (k - 1); budget++) {
            uint32_t keep[5], expected[5] = {0};
            double loss;
            must(mckp_budgets(&m, budget, keep, &loss, &err), &err);
            ck_assert_double_eq(loss, brute(cost, n, k, budget, expected));
            ck_assert_mem_eq(keep, expected, n * sizeof *keep);
        }
        mckp_free(&m);
    }
}
END_TEST

START_TEST(grid_is_a_coarser_problem)
{
    case_seed("grid");
    double ratios[TABLE_ROWS];
    cache_shape shape = {2, 2, 450, 2, 4};
    problem p;
    mckp grid, exact;
    kvb_error err = {0};
    solved(&p, CASE_HEAVY, &shape, SCOPE_GLOBAL, ratios);
    must(mckp_grid(&grid, &p.curves, NULL, &err), &err);
    must(mckp_tokens(&exact, &p.curves, NULL, &err), &err);
    ck_assert_uint_eq(grid.step, 4);
    ck_assert_uint_eq(grid.base, 6);
    ck_assert_uint_eq(grid.n_choices, 112);
    for (int r = 0; r < TABLE_ROWS; r++) {
        uint32_t keep[4];
        uint64_t budget = total_kept(p.allocation.keep + r * 4, 4);
        double coarse, fine;
        must(mckp_budgets(&grid, budget, keep, &coarse, &err), &err);
        must(mckp_budgets(&exact, budget, NULL, &fine, &err), &err);
        ck_assert(total_kept(keep, 4) <= budget && (total_kept(keep, 4) > budget - 4 || r == 0));
        ck_assert(fine <= coarse + 1e-12 * p.curves.total);
        ck_assert(fabs(certificate_loss(&p.curves, 0, 4, keep) - coarse) <= 1e-12 * p.curves.total);
    }
    mckp_free(&grid);
    mckp_free(&exact);
    problem_free(&p);
}
END_TEST

START_TEST(dp_refuses_what_it_cannot_do)
{
    kvb_error err = {0};
    mckp m;
    const double cost[4] = {3, 1, INFINITY, 0}, good[4] = {3, 1, 2, 0};
    ck_assert_int_eq(mckp_solve(&m, cost, 2, 2, NULL, &err), KVB_NUMERIC);
    ck_assert_int_eq(mckp_solve(&m, good, 0, 2, NULL, &err), KVB_ARGUMENT);
    ck_assert_int_eq(mckp_solve(&m, good, 2, 70000, NULL, &err), KVB_UNSUPPORTED);
    ck_assert_int_eq(mckp_solve(&m, good, 2, 2, &(mckp_limits){.max_bytes = 10}, &err), KVB_UNSUPPORTED);
    ck_assert_int_eq(mckp_solve(&m, good, 2, 2, &(mckp_limits){.max_work = 1}, &err), KVB_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.message, "2 heads x 2 choices"));
    ck_assert_ptr_null(m.value);
    loss_curves c;
    must(loss_curves_init(&c, &(cache_shape){30, 3, 4125, 4, 32}, &err),
         &err); // the default model: sizes are checked before use
    memset(c.loss, 0, sizeof *c.loss * 90 * 4090);
    ck_assert_int_eq(mckp_tokens(&m, &c, NULL, &err), KVB_UNSUPPORTED);
    must(mckp_grid(&m, &c, NULL, &err), &err);
    uint32_t keep[90];
    ck_assert_int_eq(mckp_budgets(&m, 90 * 41 - 1, keep, NULL, &err), KVB_ARGUMENT);
    must(mckp_budgets(&m, 90 * 41, keep, NULL, &err), &err);
    for (int i = 0; i < 90; i++) ck_assert_uint_eq(keep[i], 41);
    mckp_free(&m);
    loss_curves_free(&c);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, bound_optimum_greedy_are_in_order);
    tcase_add_test(tc, rows_equal_single_bounds);
    tcase_add_test(tc, perfect_metric_has_no_gap);
    tcase_add_test(tc, broken_rows_are_refused);
    tcase_add_test(tc, known_optimum);
    tcase_add_test(tc, dp_equals_brute_force);
    tcase_add_test(tc, grid_is_a_coarser_problem);
    tcase_add_test(tc, dp_refuses_what_it_cannot_do);
}

UNIT_MAIN("solver_exact", fill)
