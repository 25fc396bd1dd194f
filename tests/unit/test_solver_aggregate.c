// From pairs to a table: means of ratios, means of losses, contexts of different lengths, rounding and the table's own
// loss.
#include "solver/aggregate.h"
#include "test_solver_cases.h"

UNIT_TEST(mean_and_deviation_of_ratios)
{
    cache_shape shape = {1, 2, 10, 0, 0};
    const uint32_t kept[3][2] = {{10, 0}, {4, 6}, {1, 9}};
    allocation a;
    ratio_mean r;
    double mean[2], std[2];
    allocation_init(&a, &shape, SCOPE_GLOBAL, 1);
    ratio_mean_init(&r, 1, 2);
    ratio_mean_get(&r, mean, std);
    ck_assert(mean[0] == 0 && std[1] == 0);
    for (int i = 0; i < 3; i++) {
        memcpy(a.keep, kept[i], sizeof kept[i]);
        ratio_mean_add(&r, &a, 10);
    }
    ratio_mean_get(&r, mean, std);
    ck_assert_double_eq_tol(mean[0], 0.5, 1e-15);
    ck_assert_double_eq_tol(mean[1], 0.5, 1e-15);
    ck_assert_double_eq_tol(std[0], sqrt((0.25 + 0.01 + 0.16) / 3), 1e-14);
    ratio_mean_free(&r);
    allocation_free(&a);
}

UNIT_TEST(mean_ratio_keeps_the_row_mean)
{
    double ratios[TABLE_ROWS];
    table_ratios(ratios);
    cache_shape shape = {3, 2, 211, 4, 1};
    ratio_mean r;
    double *mean = malloc(TABLE_ROWS * 6 * sizeof *mean);
    ratio_mean_init(&r, TABLE_ROWS, 6);
    for (int q = 0; q < 5; q++) {
        problem p;
        case_solved(&p, CASE_HEAVY, &shape, SCOPE_GLOBAL, HULL_FEASIBLE);
        ratio_mean_add(&r, &p.allocation, shape.n_tokens);
        problem_free(&p);
    }
    ratio_mean_get(&r, mean, NULL);
    for (int i = 0; i < TABLE_ROWS; i++) {
        double row = 0;
        for (int h = 0; h < 6; h++) {
            row += mean[i * 6 + h] / 6;
            if (i > 0) ck_assert(mean[i * 6 + h] >= mean[(i - 1) * 6 + h]);
        }
        if (i < 96)
            ck_assert_double_eq_tol(row, ratios[i],
                                    0.5 / (6 * 211) + 1e-12); // the floor of 5 of 211 tokens ends it at 0.976
    }
    free(mean);
    ratio_mean_free(&r);
}

// In the middle of hulls, the budgets of mean_loss minimise the mean relative loss: no single-pair optimum or mean of
// ratios beats them by more than the certified gap.
UNIT_TEST(mean_loss_minimises_the_mean)
{
    enum { PAIRS = 4 };
    double ratios[TABLE_ROWS];
    table_ratios(ratios);
    cache_shape shape = {2, 3, 200, 4, 1};
    problem p[PAIRS], whole;
    loss_mean m;
    loss_mean_init(&m, &shape);
    solve_options options = {HULL_FEASIBLE, SCOPE_GLOBAL, ratios, TABLE_ROWS, NULL};
    for (int i = 0; i < PAIRS; i++) {
        problem_init(&p[i], &shape, &options);
        loss_curves_free(&p[i].curves);
        case_curves(&p[i].curves, CASE_HEAVY, &shape);
        help_ok(problem_solve(&p[i], err));
        help_ok(loss_mean_add(&m, &p[i].curves, err));
    }
    loss_mean_finish(&m);
    problem_init(&whole, &shape, &options);
    help_ok(problem_solve_curves(&whole, &m.curves, err));
    for (int r = 0; r < 95; r++) {
        double ours = 0;
        for (int i = 0; i < PAIRS; i++)
            ours += certificate_loss(&p[i].curves, 0, 6, whole.allocation.keep + r * 6) / p[i].curves.total / PAIRS;
        ck_assert_double_eq_tol(ours, whole.loss[r], 1e-12);
        for (int k = 0; k < PAIRS; k++) {
            double other = 0;
            for (int i = 0; i < PAIRS; i++)
                other += certificate_loss(&p[i].curves, 0, 6, p[k].allocation.keep + r * 6) / p[i].curves.total / PAIRS;
            ck_assert(whole.bound[r] <= other + 1e-12);
        }
    }
    for (int i = 0; i < PAIRS; i++) problem_free(&p[i]);
    problem_free(&whole);
    loss_mean_free(&m);
}

// A context in which each token of another one occurs twice has the same curve over the kept share.
UNIT_TEST(contexts_of_different_length_meet_on_the_share)
{
    const double few[8] = {8, 4, 2, 1, 3, 2, 2, 0};
    double many[16];
    for (int i = 0; i < 16; i++) many[i] = few[i / 8 * 4 + i % 8 / 2] * 10;
    loss_curves a, b;
    loss_mean m, single;
    case_by_hand(&a, 1, 2, 4, few);
    case_by_hand(&b, 1, 2, 8, many);
    loss_mean_init(&m, &b.shape);
    help_ok(loss_mean_add(&m, &a, err));
    help_ok(loss_mean_add(&m, &b, err));
    loss_mean_finish(&m);
    loss_mean_init(&single, &b.shape);
    help_ok(loss_mean_add(&single, &b, err));
    loss_mean_finish(&single);
    for (int i = 0; i < 16; i++) ck_assert_double_eq_tol(m.curves.gain[i], single.curves.gain[i], 1e-14);
    loss_curves both = loss_curves_make(&b.shape);
    loss_mean_weigh(&both, (loss_mean[]){m, single}, 2, (double[]){0.25, 0.5});
    for (int i = 0; i < 16; i++) ck_assert(both.gain[i] == 0.25 * m.curves.gain[i] + 0.5 * single.curves.gain[i]);
    loss_curves_free(&both);
    help_fails(loss_mean_add(&single, &(loss_curves){.shape = {1, 2, 9, 0, 0}}, err), KVB_ARGUMENT, "");
    help_fails(loss_mean_add(&single, &(loss_curves){.shape = {2, 2, 8, 0, 0}}, err), KVB_MISMATCH, "");
    help_fails(loss_mean_add(&single, &(loss_curves){.shape = {1, 2, 8, 1, 0}}, err), KVB_MISMATCH, "");
    loss_curves_free(&a);
    loss_curves_free(&b);
    loss_mean_free(&m);
    loss_mean_free(&single);
}

UNIT_TEST(resampling_keeps_the_mass_and_the_floor)
{
    for (int round = 0; round < 200; round++) {
        cache_shape small = case_shape(), grid = small;
        grid.n_tokens += case_below(300);
        loss_curves c;
        loss_mean m;
        kvb_error err = {0};
        case_curves(&c, (case_kind)(round % CASE_KINDS), &small);
        loss_mean_init(&m, &grid);
        must(loss_mean_add(&m, &c, &err), &err);
        loss_mean_finish(&m);
        for (uint32_t h = 0; h < shape_heads(&small); h++)
            if (c.total > 0) ck_assert_double_eq_tol(loss_at(&m.curves, h, 0), loss_at(&c, h, 0) / c.total, 1e-12);
        // The floor in shares is at least the context's own, and less than a token above it.
        double share = (double)c.floor / small.n_tokens, ours = (double)m.curves.floor / grid.n_tokens;
        ck_assert(m.curves.floor <= grid.n_tokens && ours >= share - 1e-15);
        ck_assert(ours <= fmax(share, (double)shape_protected(&grid) / grid.n_tokens) + 1.0 / grid.n_tokens);
        loss_curves_free(&c);
        loss_mean_free(&m);
    }
}

UNIT_TEST(rounding_is_by_largest_remainder_in_a_layer)
{
    uint32_t keep[4];
    round_layers((const double[]){0.5, 0.5004, 0.2501}, 1, 3, 10, keep); // kvpress's own example: 5 5 7
    ck_assert(keep[0] == 5 && keep[1] == 5 && keep[2] == 7);
    round_layers((const double[]){0.85, 0.85, 0.85, 0.85}, 2, 2, 10,
                 keep); // 1.5 each: equal fractions, lower head first
    ck_assert(keep[0] == 2 && keep[1] == 1 && keep[2] == 2 && keep[3] == 1);
    round_layers((const double[]){1, 1, 0, 0}, 2, 2, 7, keep);
    ck_assert(keep[0] == 1 && keep[1] == 1 && keep[2] == 7 && keep[3] == 7);
    for (int round = 0; round < 2000; round++) { // counts from which ratios were made come back
        uint32_t t = 1 + case_below(9000), kept[4];
        double ratio[4];
        for (int i = 0; i < 4; i++) ratio[i] = 1 - (double)(kept[i] = 1 + case_below(t)) / t;
        round_layers(ratio, 1, 4, t, keep);
        ck_assert_mem_eq(keep, kept, sizeof keep);
        for (int i = 0; i < 4; i++) ratio[i] = case_uniform();
        round_layers(ratio, 1, 4, t, keep);
        double ideal = 0;
        for (int i = 0; i < 4; i++) ideal += (1 - ratio[i]) * t;
        if (t >= 100) ck_assert(fabs((double)case_total(keep, 4) - ideal) <= 0.5 + 4); // heads at 1 may add
        for (int i = 0; i < 4; i++) ck_assert(keep[i] <= t && fabs(keep[i] - (1 - ratio[i]) * t) <= 1);
    }
}

UNIT_TEST(table_loss_is_the_loss_of_its_counts)
{
    double ratios[TABLE_ROWS];
    table_ratios(ratios);
    cache_shape shape = {2, 2, 180, 4, 1};
    problem p;
    ratio_mean r;
    case_solved(&p, CASE_HEAVY, &shape, SCOPE_GLOBAL, HULL_FEASIBLE);
    ratio_mean_init(&r, TABLE_ROWS, 4);
    ratio_mean_add(&r, &p.allocation, shape.n_tokens);
    double mean[TABLE_ROWS * 4], sum[TABLE_ROWS] = {0};
    uint32_t keep[4];
    ratio_mean_get(&r, mean, NULL);
    table_loss_add(sum, &p.curves, TABLE_ROWS, mean, keep);
    for (int i = 0; i < TABLE_ROWS; i++)
        ck_assert_double_eq_tol(sum[i], p.loss[i], 1e-12); // one pair: its own optimum, exactly
    ratio_mean_free(&r);
    problem_free(&p);
}

UNIT_TEST(shrinking_ends_at_uniform)
{
    cache_shape shape = {3, 2, 120, 4, 1};
    for (int kind = 0; kind < CASE_KINDS; kind++) {
        problem p;
        double ratios[TABLE_ROWS];
        table_ratios(ratios);
        problem_init(&p, &shape, &(solve_options){HULL_FEASIBLE, SCOPE_GLOBAL, ratios, TABLE_ROWS, NULL});
        loss_curves_free(&p.curves);
        case_curves(&p.curves, kind, &shape);
        double total = p.curves.total, first = p.curves.gain[0], mean = 0;
        for (int h = 0; h < 6; h++) mean += p.curves.gain[(size_t)h * 115] / 6;
        loss_curves_shrink(&p.curves, 0.25);
        ck_assert_double_eq_tol(p.curves.gain[0], 0.75 * first + 0.25 * mean, 1e-12 * (1 + first));
        ck_assert_double_eq_tol(p.curves.total, total, 1e-9 * (1 + total));
        loss_curves_shrink(&p.curves, 1);
        ck_assert_double_eq_tol(p.curves.total, total, 1e-9 * (1 + total));
        help_ok(problem_solve(&p, err));
        // Equal heads give up their blocks one after the other: they differ by one block of the common hull at the
        // most.
        for (int r = 0; r < TABLE_ROWS; r++) {
            const uint32_t *keep = p.allocation.keep + (size_t)r * 6;
            double of_head = certificate_loss(&p.curves, 0, 1, keep), all = certificate_loss(&p.curves, 0, 6, keep);
            ck_assert_double_ge(all + 1e-9 * (1 + total), p.bound[r] * total);
            ck_assert_double_ge(of_head, 0);
            uint32_t least = keep[0], most = keep[0];
            for (int h = 1; h < 6; h++) {
                least = keep[h] < least ? keep[h] : least;
                most = keep[h] > most ? keep[h] : most;
            }
            uint32_t longest = 0;
            for (uint32_t b = 0; b < p.hulls.count[0]; b++)
                longest = p.hulls.block[b].length > longest ? p.hulls.block[b].length : longest;
            if (kind != CASE_ZERO && kind != CASE_CONSTANT && kind != CASE_TIED && kind != CASE_SPARSE)
                ck_assert_uint_le(most - least, longest);
        }
        problem_free(&p);
    }
}

UNIT_TEST(means_can_be_joined)
{
    cache_shape shape = {2, 2, 90, 2, 3}, shorter = {2, 2, 61, 2, 3};
    loss_curves c[2];
    loss_mean both, one[2];
    case_curves(&c[0], CASE_HEAVY, &shape);
    case_curves(&c[1], CASE_RANDOM, &shorter);
    loss_mean_init_coarse(&both, &shape, 40);
    ck_assert_uint_eq(both.curves.shape.n_tokens, 40);
    for (int i = 0; i < 2; i++) {
        loss_mean_init_coarse(&one[i], &shape, 40);
        help_ok(loss_mean_add(&both, &c[i], err));
        help_ok(loss_mean_add(&one[i], &c[i], err));
    }
    loss_mean_join(&one[0], &one[1]);
    ck_assert_uint_eq(one[0].count, 2);
    ck_assert_double_eq_tol(one[0].floors, 5.0 / 90 + 5.0 / 61, 1e-12);
    for (size_t i = 0; i < 4 * (size_t)shape_middle(&both.curves.shape); i++)
        ck_assert_double_eq_tol(both.curves.gain[i], one[0].curves.gain[i], 1e-15);
    loss_mean_finish(&both);
    ck_assert_double_eq_tol(both.curves.total, 1, 1e-12);
    loss_mean_free(&both);
    for (int i = 0; i < 2; i++) loss_mean_free(&one[i]), loss_curves_free(&c[i]);
}

UNIT_MAIN_EACH("solver_aggregate", case_seed, NULL)
