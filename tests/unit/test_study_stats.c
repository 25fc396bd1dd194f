// The bootstrap against what theory says of simple samples, and its repeatability.
#include "study/stats.h"
#include "test_solver_cases.h"

START_TEST(interval_of_a_mean_is_that_of_theory)
{
    case_seed("bootstrap");
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
    loss_interval mean[2], ratio[2], again[2], other[2];
    kvb_error err = {0};
    must(bootstrap_losses(&s, 0, 1, mean, ratio, &err), &err);
    double half = (mean[0].high - mean[0].low) / 2, theory = 1.96 / sqrt(12.0 * TEXTS);
    ck_assert_double_eq_tol(mean[0].value, 0.5, 3 * theory);
    ck_assert_double_eq_tol(half, theory, 0.15 * theory);
    ck_assert(mean[0].low < mean[0].value && mean[0].value < mean[0].high);
    // A fixed ratio has no spread: methods are compared on the same draws.
    ck_assert_double_eq_tol(ratio[1].value, -0.2, 1e-12);
    ck_assert_double_eq_tol(ratio[1].low, -0.2, 1e-12);
    ck_assert_double_eq_tol(ratio[1].high, -0.2, 1e-12);
    must(bootstrap_losses(&s, 0, 1, again, ratio, &err), &err);
    must(bootstrap_losses(&s, 0, 2, other, ratio, &err), &err);
    ck_assert(memcmp(mean, again, sizeof mean) == 0);
    ck_assert(memcmp(mean, other, sizeof mean) != 0);
}
END_TEST

// Ten equal questions of each of two texts are worth two observations, not twenty.
START_TEST(questions_of_a_text_are_not_independent)
{
    double loss[20];
    for (int i = 0; i < 20; i++) loss[i] = i < 10 ? 1 : 3;
    const uint32_t first[3] = {0, 10, 20};
    loss_sample s = {1, 20, 2, loss, first};
    loss_interval mean, ratio;
    kvb_error err = {0};
    must(bootstrap_losses(&s, 0, 7, &mean, &ratio, &err), &err);
    ck_assert_double_eq(mean.value, 2);
    ck_assert_double_eq(mean.low, 1);
    ck_assert_double_eq(mean.high, 3);
    ck_assert(bootstrap_losses(&s, 1, 7, &mean, &ratio, &err) == KVB_ARGUMENT);
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
