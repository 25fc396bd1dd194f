// Worst-case tables: weights, bounds, and agreement with the plain problems at both ends of the tail.
#include "solver/robust.h"
#include "test_solver_cases.h"

static const double RATIOS[] = {0.1, 0.3, 0.5, 0.8, 0.9};
enum { N_RATIOS = 5, TEXTS = 4 };

static void make_texts(loss_mean *texts, uint32_t n, const cache_shape *shape)
{
    kvb_error err = {0};
    for (uint32_t k = 0; k < n; k++) {
        loss_curves c;
        case_curves(&c, k % 2 ? CASE_HEAVY : CASE_RANDOM, shape);
        loss_mean_init_coarse(&texts[k], shape, 64);
        must(loss_mean_add(&texts[k], &c, &err), &err);
        loss_mean_finish(&texts[k]);
        loss_curves_free(&c);
    }
}

static double text_loss(const loss_mean *text, const double *prune_ratio, uint32_t n)
{
    const loss_curves *c = &text->curves;
    uint32_t m = shape_middle(&c->shape);
    double loss = 0;
    for (uint32_t h = 0; h < n; h++) {
        double x = (1 - prune_ratio[h]) * m;
        uint32_t i = x < m ? (uint32_t)x : m - 1;
        const double *own = c->loss + (size_t)h * (m + 1);
        loss += own[i] + (x - i) * (own[i + 1] - own[i]);
    }
    return loss;
}

UNIT_TEST(tail_of_a_list)
{
    const double loss[5] = {1, 5, 3, 5, 2};
    double w[5];
    ck_assert_double_eq(tail_mean(loss, 5, 0, w), 5);
    ck_assert(w[1] == 1 && w[3] == 0);
    ck_assert_double_eq_tol(tail_mean(loss, 5, 0.2, NULL), 5, 1e-15);
    ck_assert_double_eq_tol(tail_mean(loss, 5, 0.5, w), (5 + 5 + 0.5 * 3) / 2.5, 1e-15);
    ck_assert_double_eq_tol(w[2], 0.2, 1e-15);
    ck_assert_double_eq_tol(tail_mean(loss, 5, 1, NULL), 3.2, 1e-14);
}

UNIT_TEST(one_text_is_greedys_problem)
{
    kvb_error err = {0};
    cache_shape shape = {3, 2, 150, 4, 1};
    loss_mean text;
    make_texts(&text, 1, &shape);
    solve_options options = {HULL_FEASIBLE, SCOPE_GLOBAL, RATIOS, N_RATIOS, NULL};
    robust_result x;
    problem p;
    must(robust_solve(&x, &text, 1, 0, &options, &err), &err);
    problem_init(&p, &text.curves.shape, &options);
    must(problem_solve_curves(&p, &text.curves, &err), &err);
    for (int r = 0; r < N_RATIOS; r++) {
        ck_assert_double_le(x.loss[r], p.loss[r] + 1e-12);
        ck_assert_double_eq_tol(x.bound[r], p.bound[r], 1e-12);
        ck_assert(x.weight[r] == 1);
    }
    problem_free(&p);
    robust_free(&x);
    loss_mean_free(&text);
}

// Losses are what they say, bounds hold for tables of every other kind, and the worst text loses less than with those.
UNIT_TEST(nothing_beats_the_bound)
{
    kvb_error err = {0};
    for (int round = 0; round < 6; round++) {
        cache_shape shape = {2, 2 + case_below(3), 120 + case_below(80), 4, 1};
        uint32_t n = shape_heads(&shape);
        loss_mean texts[TEXTS], all;
        make_texts(texts, TEXTS, &shape);
        solve_options options = {HULL_FEASIBLE, round % 2 ? SCOPE_LAYER : SCOPE_GLOBAL, RATIOS, N_RATIOS, NULL};
        double tail = round / 2 == 0 ? 0 : round / 2 == 1 ? 0.5 : 1;
        robust_result x;
        problem p;
        must(robust_solve(&x, texts, TEXTS, tail, &options, &err), &err);
        loss_mean_init_coarse(&all, &shape, 64);
        for (int k = 0; k < TEXTS; k++) loss_mean_join(&all, &texts[k]);
        loss_mean_finish(&all);
        problem_init(&p, &all.curves.shape, &options);
        must(problem_solve_curves(&p, &all.curves, &err), &err);
        for (int r = 0; r < N_RATIOS; r++) {
            double own[TEXTS], common[TEXTS], uniform[TEXTS], table[16], flat[16], sum = 0, row = 0;
            for (uint32_t h = 0; h < n; h++) {
                table[h] = 1 - p.allocation.keep[r * n + h] / 64.0;
                flat[h] = RATIOS[r];
                row += x.prune_ratio[r * n + h] / n;
            }
            ck_assert_double_le(fabs(row - RATIOS[r]), 1.0 / 64);
            for (int k = 0; k < TEXTS; k++) {
                own[k] = text_loss(&texts[k], x.prune_ratio + r * n, n);
                common[k] = text_loss(&texts[k], table, n);
                uniform[k] = text_loss(&texts[k], flat, n);
                sum += x.weight[r * TEXTS + k];
                ck_assert_double_ge(x.weight[r * TEXTS + k], 0);
            }
            ck_assert_double_eq_tol(sum, 1, 1e-9);
            ck_assert_double_eq_tol(tail_mean(own, TEXTS, tail, NULL), x.loss[r], 1e-9);
            ck_assert_double_le(x.bound[r], x.loss[r] + 1e-12);
            ck_assert_double_le(x.bound[r], tail_mean(common, TEXTS, tail, NULL) + 1e-12);
            if (!x.saturated[r]) ck_assert_double_le(x.bound[r], tail_mean(uniform, TEXTS, tail, NULL) + 1e-2);
            ck_assert_double_le(x.loss[r], tail_mean(common, TEXTS, tail, NULL) * 1.005 + 1e-12);
            ck_assert_double_le(x.loss[r] - x.bound[r], 0.03 * x.loss[r]);
        }
        robust_free(&x);
        problem_free(&p);
        loss_mean_free(&all);
        for (int k = 0; k < TEXTS; k++) loss_mean_free(&texts[k]);
    }
}

UNIT_TEST(hostile_arguments)
{
    kvb_error err = {0};
    robust_result x;
    solve_options options = {HULL_FEASIBLE, SCOPE_GLOBAL, RATIOS, N_RATIOS, NULL};
    ck_assert(robust_solve(&x, NULL, 0, 0, &options, &err) == KVB_ARGUMENT);
    loss_mean text;
    cache_shape shape = {1, 2, 30, 2, 1};
    make_texts(&text, 1, &shape);
    ck_assert(robust_solve(&x, &text, 1, -1, &options, &err) == KVB_ARGUMENT);
    ck_assert(robust_solve(&x, &text, 1, NAN, &options, &err) == KVB_ARGUMENT);
    ck_assert(x.loss == NULL);
    loss_mean_free(&text);
}

UNIT_MAIN_EACH("solver_robust", case_seed, NULL)
