// The second opinion on bounds: as good as greedy's multiplier, never above the optimum.
#include "solver/checker.h"
#include "solver/exact.h"
#include "test_solver_cases.h"

START_TEST(agrees_with_the_certificate)
{
    case_seed("checker");
    for (int round = 0; round < 12 * CASE_KINDS; round++) {
        cache_shape shape = case_shape();
        solve_scope scope = round % 2 ? SCOPE_LAYER : SCOPE_GLOBAL;
        double ratios[TABLE_ROWS], near[TABLE_ROWS], bound[TABLE_ROWS];
        kvb_error err = {0};
        problem p;
        exact_result x;
        table_ratios(ratios);
        must(problem_init(&p, &shape, &(solve_options){HULL_FEASIBLE, scope, ratios, TABLE_ROWS, NULL}, &err), &err);
        loss_curves_free(&p.curves);
        case_curves(&p.curves, (case_kind)(round % CASE_KINDS), &shape);
        must(problem_solve(&p, &err), &err);
        must(exact_init(&x, &shape, scope, TABLE_ROWS, &err), &err);
        must(exact_solve(&x, &p.curves, &p.allocation, NULL, &err), &err);
        // From nowhere, from about where it is, from far away.
        for (int r = 0; r < TABLE_ROWS; r++) near[r] = p.lambda[r] * p.curves.total * (round % 3 == 1 ? 1 : 1e-9);
        checker_rows(&p.curves, scope == SCOPE_LAYER, TABLE_ROWS, ratios, round % 3 ? near : NULL, bound);
        double tolerance = 1e-11 * (p.curves.total + 1e-300);
        for (int r = 0; r < TABLE_ROWS; r++) {
            ck_assert_msg(bound[r] >= x.bound[r] - tolerance, "round %d row %d: %.17g, certificate %.17g", round, r,
                          bound[r], x.bound[r]);
            ck_assert_msg(bound[r] <= x.optimum[r] + tolerance, "round %d row %d: %.17g, optimum %.17g", round, r,
                          bound[r], x.optimum[r]);
            uint64_t budget = 0;
            for (uint32_t h = 0; h < x.n_heads / x.n_groups; h++) budget += x.keep[(size_t)r * x.n_heads + h];
            ck_assert_uint_eq(checker_budget(&p.curves, shape.n_layers / x.n_groups, ratios[r]), budget);
        }
        exact_free(&x);
        problem_free(&p);
    }
}
END_TEST

// methods.md 2.5 by hand: at 3 tokens D is largest, 109 = 170 - 30 - 16 - 15, at the slope 15 of the block that greedy
// stops in.
START_TEST(by_hand)
{
    const double gains[16] = {30, 5, 25, 10, 2, 8, 12, 8, 16, 14, 12, 9, 9, 6, 2, 2};
    loss_curves c;
    double lambda;
    uint64_t kept;
    case_by_hand(&c, 1, 2, 8, gains);
    ck_assert_double_eq_tol(checker_best(&c, 0, 2, 3, 0, &lambda), 109, 1e-9);
    ck_assert(lambda >= 14 && lambda <= 15);
    ck_assert_double_eq(checker_dual(&c, 0, 2, 0, 3, &kept), 0);
    ck_assert_uint_eq(kept, 16);
    // At 20 only the first tokens are worth their price: 70 + 20 and 70, less 3 times 20.
    ck_assert_double_eq(checker_dual(&c, 0, 2, 20, 3, &kept), 100);
    ck_assert_uint_eq(kept, 1);
    loss_curves_free(&c);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, agrees_with_the_certificate);
    tcase_add_test(tc, by_hand);
}

UNIT_MAIN("solver_checker", fill)
