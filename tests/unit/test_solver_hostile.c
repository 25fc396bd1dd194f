// Inputs that are allowed but say little: every solver must give a defined, certified result. What is not allowed, NaN,
// negative and infinite importance, contexts without a free token, is refused in test_solver_curve.c.
#include "solver/checker.h"
#include "solver/constrained.h"
#include "solver/exact.h"
#include "test_solver_cases.h"

enum { MOST = 64 };

// Greedy, exact and constrained (pages of 2) budgets of one context, with bounds that the checker proves.
static void solve_all_ways(const cache_shape *shape, const float *scores, const float *oracle, double *losses)
{
    kvb_error err = {0};
    double ratios[TABLE_ROWS], bound[TABLE_ROWS];
    metric_order order;
    problem p;
    exact_result x;
    constrained_rows rows;
    kvb_limits limits;
    table_ratios(ratios);
    must(metric_order_make(&order, shape, scores, &err), &err);
    must(problem_init(&p, shape, &(solve_options){HULL_FEASIBLE, SCOPE_GLOBAL, ratios, TABLE_ROWS, NULL}, &err), &err);
    must(loss_curves_fill(&p.curves, &order, oracle, &err), &err);
    must(problem_solve(&p, &err), &err);
    must(exact_init(&x, shape, SCOPE_GLOBAL, TABLE_ROWS, &err), &err);
    must(exact_solve(&x, &p.curves, &p.allocation, NULL, &err), &err);
    must(kvb_limits_init(&limits, shape->n_layers, shape->n_kv_heads, &err), &err);
    limits.block = 2;
    must(constrained_solve(&rows, &p.curves, &limits, ratios, TABLE_ROWS, true, &err), &err);
    checker_rows(&p.curves, false, TABLE_ROWS, ratios, NULL, bound);
    for (int r = 0; r < TABLE_ROWS; r++) {
        ck_assert(isfinite(p.loss[r]) && isfinite(p.bound[r]) && isfinite(p.lambda[r]) && p.bound[r] <= p.loss[r]);
        ck_assert(x.proved[r] && x.optimum[r] <= x.greedy[r] && rows.proved[r]);
        ck_assert(bound[r] <= x.optimum[r] + 1e-12 * p.curves.total);
        ck_assert(isfinite(rows.loss[r]) && isfinite(rows.bound[r]) && rows.bound[r] <= rows.loss[r]);
        must(constrained_check(&limits, shape->n_tokens, rows.keep + (size_t)r * rows.n_heads, &err), &err);
        losses[r] = x.optimum[r];
    }
    constrained_rows_free(&rows);
    kvb_limits_free(&limits);
    exact_free(&x);
    problem_free(&p);
    metric_order_free(&order);
}

START_TEST(little_is_said)
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
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, little_is_said);
}

UNIT_MAIN("solver, hostile inputs", fill)
