// Promises: p-values that keep their level on losses of awkward kinds, the sequence of ratios, and the number of texts.
#include "study/promise.h"
#include "test_solver_cases.h"

enum { DRAWS = 4000 };

// Draws a loss with mean `mean`: a coin, a nearly constant one, or one of a few large ones among small ones.
static double draw_loss(int kind, double mean)
{
    if (kind == 0) return case_uniform() < mean;
    if (kind == 1) return mean * (0.8 + 0.4 * case_uniform());
    return case_uniform() < 0.1 ? 5 * mean : mean * 5 / 9;
}

static double share_passed(int kind, double mean, double limit, uint32_t n, double error)
{
    double loss[64];
    uint32_t passed = 0;
    for (int d = 0; d < DRAWS; d++) {
        for (uint32_t i = 0; i < n; i++) loss[i] = draw_loss(kind, mean);
        passed += promise_p_value(loss, n, limit, 1) <= error;
    }
    return (double)passed / DRAWS;
}

UNIT_TEST(p_values_keep_their_level)
{
    for (int kind = 0; kind < 3; kind++)
        for (uint32_t n = 10; n <= 60; n += 25) {
            // The mean is the limit itself: the hardest case in which no promise may be made.
            double wrong = share_passed(kind, 0.15, 0.15, n, 0.1);
            ck_assert_msg(wrong <= 0.1 + 3 * sqrt(0.1 * 0.9 / DRAWS), "kind %d, %u texts: broken in %.3f", kind, n,
                          wrong);
        }
}

UNIT_TEST(small_variance_is_rewarded)
{
    double steady = share_passed(1, 0.07, 0.15, 40, 0.1), coins = share_passed(0, 0.07, 0.15, 40, 0.1);
    ck_assert_msg(steady > 0.95, "nearly constant losses pass in %.3f", steady);
    ck_assert_msg(coins < steady, "coins in %.3f, nearly constant losses in %.3f", coins, steady);
}

UNIT_TEST(p_values_by_hand)
{
    const double none[3] = {0, 0, 0}, all[2] = {1, 1};
    // Nothing lost: (1 - limit)^-n for the largest bet.
    double wealth = 0;
    const double bets[4] = {1, 0.5, 0.25, 0.125}, stakes[4] = {0.5, 0.25, 0.125, 0.125};
    for (int k = 0; k < 4; k++) wealth += stakes[k] * pow(1 + bets[k] * 0.2 / 0.8, 3);
    ck_assert_double_eq_tol(promise_p_value(none, 3, 0.2, 1), 1 / wealth, 1e-12);
    ck_assert_double_eq(promise_p_value(all, 2, 0.2, 1), 1);
    // Three losses that each count twice are like six texts.
    const double six[6] = {0};
    ck_assert_double_eq_tol(promise_p_value(none, 3, 0.2, 2), promise_p_value(six, 6, 0.2, 1), 1e-12);
}

UNIT_TEST(how_many_texts)
{
    uint32_t n = promise_least_texts(0.2, 0.05);
    double none[64] = {0};
    ck_assert(n > 1 && n < 64 && promise_p_value(none, n, 0.2, 1) <= 0.05);
    ck_assert(promise_p_value(none, n - 1, 0.2, 1) > 0.05);
    const double some[4] = {0.1, 0.05, 0.15, 0.1}, many[2] = {0.3, 0.2};
    ck_assert_uint_gt(promise_texts_needed(some, 4, 0.2, 0.05), n);
    ck_assert_uint_eq(promise_texts_needed(many, 2, 0.2, 0.05), 0);
}

UNIT_TEST(limits_become_criteria)
{
    enum { RATIOS = 2, TEXTS = 30 };
    static const double values[PROMISE_LIMITS][RATIOS][TEXTS], limits[PROMISE_LIMITS] = {0.1, NAN, 0.3};
    promise_criterion of[PROMISE_LIMITS];
    promise_task task = {.n_ratios = RATIOS, .n_texts = TEXTS, .error = 0.05};
    kvb_error err = {0};
    must(promise_ask(&task, of, limits, 0, values[0][0], &err), &err);
    ck_assert(task.criteria == of && task.n_criteria == 2);
    ck_assert(of[0].limit == 0.1 && of[0].cap == 0.5 && of[0].values == values[PROMISE_KL][0]);
    ck_assert(of[1].limit == 0.3 && of[1].cap == 1.5 && of[1].values == values[PROMISE_NLL][0]);
    must(promise_ask(&task, of, limits, 0.6, values[0][0], &err), &err);
    ck_assert(of[0].cap == 0.6 && of[1].cap == 0.6);
    task.n_texts = promise_least_texts(0.2, 0.05) - 1;
    ck_assert(promise_ask(&task, of, limits, 0, values[0][0], &err) == KVB_ARGUMENT);
    ck_assert(strstr(err.message, "texts promise nothing"));
}

UNIT_TEST(the_sequence_ends_at_the_first_failure)
{
    enum { RATIOS = 4, TEXTS = 50 };
    double kl[RATIOS][TEXTS], flips[RATIOS][TEXTS];
    const double level[RATIOS] = {0.01, 0.02, 0.30, 0.01}; // the last would pass by itself
    for (int r = 0; r < RATIOS; r++)
        for (int i = 0; i < TEXTS; i++) {
            kl[r][i] = level[r] * (i % 2 ? 1.5 : 0.5);
            flips[r][i] = r ? 0.5 : 0;
        }
    promise_criterion criteria[2] = {{.limit = 0.1, .cap = 0.5, .values = kl[0]},
                                     {.limit = 0.2, .cap = 1, .values = flips[0]}};
    promise_task task = {criteria, 1, RATIOS, TEXTS, 0.05};
    promise_row rows[2 * RATIOS];
    uint32_t passed;
    kvb_error err = {0};
    must(promise_find(&task, rows, &passed, &err), &err);
    ck_assert_uint_eq(passed, 2);
    ck_assert(rows[3].p <= 0.05 && rows[2].p > 0.05);
    ck_assert_double_eq_tol(rows[2].mean, 0.3, 1e-12);
    ck_assert_double_eq_tol(rows[2].clipped, 0.3, 1e-12);
    task.n_criteria = 2; // both must hold
    must(promise_find(&task, rows, &passed, &err), &err);
    ck_assert_uint_eq(passed, 1);
    kl[0][0] = 9; // clipped: one text cannot spoil it alone
    must(promise_find(&task, rows, &passed, &err), &err);
    ck_assert_double_eq_tol(rows[0].clipped, rows[0].mean - 8.5 / TEXTS, 1e-12);
    kl[3][7] = NAN;
    ck_assert(promise_find(&task, NULL, &passed, &err) == KVB_NUMERIC && strstr(err.message, "ratio 3, text 7"));
    kl[3][7] = 0;
    criteria[0].cap = 0.1;
    ck_assert(promise_find(&task, NULL, &passed, &err) == KVB_ARGUMENT);
}

// Texts like real ones: a few lose ten times as much as most; damage grows with the ratio.
UNIT_TEST(promises_are_kept_on_halves)
{
    enum { RATIOS = 10, TEXTS = 120, HALF = TEXTS / 2, RESAMPLES = 200 };
    static double kl[RATIOS][TEXTS];
    for (int i = 0; i < TEXTS; i++) {
        double weight = exp(1.2 * (case_uniform() + case_uniform() + case_uniform() - 1.5));
        for (int r = 0; r < RATIOS; r++) kl[r][i] = 0.002 * weight * exp(0.6 * r);
    }
    uint32_t broken = 0, refused = 0, all_passed = 0;
    for (int draw = 0; draw < RESAMPLES; draw++) {
        double half[RATIOS][HALF], others[RATIOS] = {0};
        const promise_criterion one = {.limit = 0.05, .cap = 0.25, .values = half[0]};
        const promise_task task = {&one, 1, RATIOS, HALF, 0.1};
        uint32_t passed, chosen = 0;
        kvb_error err = {0};
        for (int i = 0; i < TEXTS; i++) {
            bool choosing = case_uniform() * (TEXTS - i) < HALF - chosen;
            for (int r = 0; r < RATIOS; r++)
                if (choosing) half[r][chosen] = kl[r][i];
                else others[r] += fmin(kl[r][i], one.cap) / (TEXTS - HALF);
            chosen += choosing;
        }
        must(promise_find(&task, NULL, &passed, &err), &err);
        all_passed += passed;
        refused += passed == 0;
        broken += passed > 0 && others[passed - 1] > one.limit;
    }
    ck_assert_msg(broken <= 20, "%u of 200 promises were broken", broken);
    ck_assert_msg(refused < 20 && all_passed >= 2 * RESAMPLES, "%u refused, %u ratios", refused, all_passed);
}

UNIT_MAIN_EACH("study/promise", case_seed, NULL)
