// Sinks and windows of last tokens: which ones lose least, and that losses are of the same whole and held out.
#include "study/window.h"
#include "study_help.h"

enum { TOKENS = 60 };

static selection from;

static void teardown(void)
{
    selection_close(&from);
    help_teardown();
}

// The metric ranks early tokens first, so a late token is lost unless the window holds it.
static void open_late(uint32_t n_late)
{
    static float first[TOKENS];
    for (uint32_t t = 0; t < TOKENS; t++) first[t] = t + n_late >= TOKENS ? 1 : 0.001f;
    const case_context late = {.id = "a", .n_tokens = TOKENS, .n_questions = 1, .questions = {{9, {0, 1e-6f}, first}}};
    case_select(&from, case_record("late.h5", &late, 1));
}

START_TEST(what_is_late_is_kept_by_a_window)
{
    window_choice c;
    const study_options o = case_options("mean_loss");
    open_late(4);
    help_ok(window_choose(&c, &from, "keydiff", &o, NULL, err));
    ck_assert_uint_eq(c.n, 4 + 5); // 1 of its own, 4, 16, 32: 64 and more are not there; and sinks but its own 1
    ck_assert(c.each[0].sink == 1 && c.each[0].window == 1 && !c.held_out);
    ck_assert_uint_eq(c.each[c.chosen].window, 4);
    // Window 1, 90 % pruned: 12 of 120 tokens stay, and 3 of the 4 late ones go.
    ck_assert_double_gt(c.each[0].loss[2], 0.5);
    ck_assert_double_lt(c.each[c.chosen].loss[2], 0.02);
    ck_assert_double_gt(c.each[0].loss[0], c.each[c.chosen].loss[0]);
    // 16 in both heads are more than 12.
    ck_assert(isnan(c.each[2].loss[2]) && isnan(c.each[2].score));
}
END_TEST

START_TEST(what_is_early_needs_none)
{
    window_choice c;
    study_options o = case_options("mean_loss");
    const case_context even = {.id = "a", .n_tokens = TOKENS, .n_questions = 1, .questions = {{9, {1, 0}, NULL}}};
    case_select(&from, case_record("even.h5", &even, 1));
    help_ok(window_choose(&c, &from, "keydiff", &o, NULL, err));
    ck_assert(c.each[c.chosen].sink == 0 && c.each[c.chosen].window == 1);
    // 60 of 120 tokens stay: all of head 0 but what the protected ones of head 1 take, 2 of 60; without sinks 1.
    ck_assert_double_eq_tol(c.each[0].loss[0], 2.0 / TOKENS, 1e-9);
    ck_assert_double_eq_tol(c.each[c.chosen].loss[0], 1.0 / TOKENS, 1e-9);
    o.sink = 1; // as somebody said: windows alone are tried
    help_ok(window_choose(&c, &from, "keydiff", &o, NULL, err));
    ck_assert(c.n == 4 && c.each[c.chosen].sink == 1 && c.each[c.chosen].window == 1);
}
END_TEST

START_TEST(budgets_are_those_of_the_other_texts)
{
    window_choice c;
    const study_options o = case_options("mean_loss");
    const case_context texts[2] = {{.id = "a", .n_tokens = TOKENS, .n_questions = 1, .questions = {{9, {1, 0}, NULL}}},
                                   {.id = "b", .n_tokens = TOKENS, .n_questions = 1, .questions = {{9, {0, 1}, NULL}}}};
    case_select(&from, case_record("two.h5", texts, 2));
    help_ok(window_choose(&c, &from, "keydiff", &o, NULL, err));
    ck_assert(c.held_out);
    // Each text needs the head that the other does not: under its own budgets it would lose 2 of 60.
    ck_assert_double_gt(c.each[0].loss[0], 0.5);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_checked_fixture(tc, help_setup, teardown);
    tcase_add_test(tc, what_is_late_is_kept_by_a_window);
    tcase_add_test(tc, what_is_early_needs_none);
    tcase_add_test(tc, budgets_are_those_of_the_other_texts);
}

UNIT_MAIN("study_window", fill)
