// Which experts a router chooses for a row, and with which weights.
#include "profiler/model/layer.h"
#include "test_profiler_cases.h"

START_TEST(the_largest_and_their_shares)
{
    const float logits[] = {0, 2, -1, 2, 1};
    uint32_t numbers[3];
    float weights[3];
    double all = exp(0) + 2 * exp(2) + exp(-1) + exp(1);
    experts_choose(logits, 5, 3, false, numbers, weights);
    ck_assert(numbers[0] == 1 && numbers[1] == 3 && numbers[2] == 4); // equal ones by number
    ck_assert_double_eq_tol(weights[0], exp(2) / all, 1e-6);
    ck_assert_double_eq_tol(weights[2], exp(1) / all, 1e-6);
    experts_choose(logits, 5, 3, true, numbers, weights);
    ck_assert_double_eq_tol(weights[0] + weights[1] + weights[2], 1, 1e-6);
    ck_assert_double_eq_tol(weights[1] / weights[2], exp(1), 1e-5);
}
END_TEST

// Large logits do not overflow, and what is no number still gives each expert once.
START_TEST(odd_logits)
{
    const float large[] = {-1000, 1000, 999}, none[] = {NAN, NAN, NAN, NAN};
    uint32_t numbers[3];
    float weights[3];
    experts_choose(large, 3, 2, true, numbers, weights);
    ck_assert(numbers[0] == 1 && numbers[1] == 2 && weights[0] > 0.7f && weights[0] < 0.74f);
    experts_choose(none, 4, 3, true, numbers, weights);
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < i; k++) ck_assert(numbers[i] < 4 && numbers[i] != numbers[k]);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, the_largest_and_their_shares);
    tcase_add_test(tc, odd_logits);
}

UNIT_MAIN("profiler experts", fill)
