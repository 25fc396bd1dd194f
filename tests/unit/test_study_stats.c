// Intervals of losses against what theory says of simple samples, and draws of subsets.
#include "study/stats.h"
#include "test_solver_cases.h"
#include <math.h>

START_TEST(interval_of_a_mean_is_that_of_theory)
{
    case_seed("intervals");
    enum { TEXTS = 400 };
    // One question per text, loss uniform in [0, 1): the mean's deviation is 1 / sqrt(12 n).
    double loss[2 * TEXTS];
    uint32_t first[TEXTS + 1];
    for (uint32_t i = 0; i < TEXTS; i++) {
        first[i] = i;
        loss[i] = case_uniform();
        loss[TEXTS + i] = 0.8 * loss[i];
    }
    first[TEXTS] = TEXTS;
    loss_sample s = {2, TEXTS, TEXTS, loss, first};
    loss_interval mean[2], ratio[2];
    kvb_error err = {0};
    must(loss_intervals(&s, 0, mean, ratio, &err), &err);
    double half = (mean[0].high - mean[0].low) / 2, theory = 1.96 / sqrt(12.0 * TEXTS);
    ck_assert_double_eq_tol(mean[0].value, 0.5, 3 * theory);
    ck_assert_double_eq_tol(half, theory, 0.15 * theory);
    ck_assert(mean[0].low < mean[0].value && mean[0].value < mean[0].high);
    // A fixed ratio has no spread: methods are compared text by text.
    ck_assert_double_eq_tol(ratio[1].value, -0.2, 1e-12);
    ck_assert_double_eq_tol(ratio[1].low, -0.2, 1e-12);
    ck_assert_double_eq_tol(ratio[1].high, -0.2, 1e-12);
}
END_TEST

// Ten equal questions of each of six texts are worth six observations, not sixty; two texts say nothing.
START_TEST(questions_of_a_text_are_not_independent)
{
    double loss[60];
    for (int i = 0; i < 60; i++) loss[i] = 1 + i / 10;
    const uint32_t first[7] = {0, 10, 20, 30, 40, 50, 60};
    loss_sample s = {1, 60, 6, loss, first};
    loss_interval mean, ratio;
    kvb_error err = {0};
    must(loss_intervals(&s, 0, &mean, &ratio, &err), &err);
    ck_assert_double_eq_tol(mean.value, 3.5, 1e-12);
    ck_assert(mean.low < 2 && mean.high > 5);
    ck_assert(ratio.value == 0 && fabs(ratio.low) < 1e-12 && fabs(ratio.high) < 1e-12);
    s.n_texts = 2;
    s.n_pairs = 20;
    must(loss_intervals(&s, 0, &mean, &ratio, &err), &err);
    ck_assert(mean.value == 1.5 && isnan(mean.low) && isnan(mean.high));
    ck_assert(loss_intervals(&s, 1, &mean, &ratio, &err) == KVB_ARGUMENT);
}
END_TEST

START_TEST(subsets_are_subsets)
{
    kvb_error err = {0};
    uint32_t seen[10] = {0};
    for (uint64_t draw = 0; draw < 200; draw++) {
        uint32_t chosen[4];
        must(draw_subset(chosen, 4, 10, 3, draw << 32, &err), &err); // high bits count too
        for (int i = 0; i < 4; i++) {
            ck_assert_uint_lt(chosen[i], 10);
            ck_assert(i == 0 || chosen[i] > chosen[i - 1]);
            seen[chosen[i]]++;
        }
    }
    for (int i = 0; i < 10; i++) ck_assert_msg(seen[i] > 40 && seen[i] < 120, "%u of 80", seen[i]);
    ck_assert(draw_subset(seen, 11, 10, 3, 0, &err) == KVB_ARGUMENT);
    must(draw_subset(seen, 0, 0, 3, 0, &err), &err);
}
END_TEST

START_TEST(heads_on_which_pairs_disagree_are_flagged)
{
    const double prune_ratio[3] = {0.9, 0.9, 0}, std[3] = {0.05, 0.11, 0};
    uint8_t flags[3];
    ck_assert_uint_eq(flag_heads(prune_ratio, std, 3, flags), 1);
    ck_assert(!flags[0] && flags[1] && !flags[2]);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, interval_of_a_mean_is_that_of_theory);
    tcase_add_test(tc, questions_of_a_text_are_not_independent);
    tcase_add_test(tc, subsets_are_subsets);
    tcase_add_test(tc, heads_on_which_pairs_disagree_are_flagged);
}

UNIT_MAIN("solver_stats", fill)
