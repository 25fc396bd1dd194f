// Greedy and tables against the true optimum: the problems are small enough to try all budgets.
#include "study/validation.h"
#include "study_help.h"

// The metric ranks badly, so that greedy stops inside a block of the hull somewhere.
static const float HARD[8] = {0, 3, 0, 0, 7, 0, 2, 0}, EASY[8] = {0, 6, 5, 4, 3, 2, 1, 0};
static const case_context CONTEXTS[] = {
    {.id = "a", .n_tokens = 8, .n_questions = 2, .questions = {{9, {0, 1}, HARD}, {9, {0, 2}, EASY}}},
    {.id = "b", .n_tokens = 8, .n_questions = 1, .questions = {{9, {0, 3}, HARD}}}};
enum { PAIRS = 3 };
static void setup(void)
{
    help_setup();
    case_select(&from, case_record("run.h5", CONTEXTS, 2));
}

// Returns the loss of head 0 or 1 if it keeps b of 8 tokens: 2 protected ones, then early ones first.
static double head_loss(const case_question *q, int head, uint32_t b)
{
    double sum = 0;
    for (uint32_t t = 1 + (b - 2); t < 7; t++) sum += head == 0 && q->first ? q->first[t] : q->head[head];
    return sum;
}

// Returns the loss of one question's best budgets at a ratio, found by trying all: a share of what can be lost.
static double best_loss(const case_question *q, double ratio)
{
    uint32_t budget = 16 - (uint32_t)rint(ratio * 16);
    double best = INFINITY, all = head_loss(q, 0, 2) + head_loss(q, 1, 2);
    if (budget < 4) budget = 4; // the floor
    for (uint32_t b = 2; b <= 8; b++)
        if (budget >= b + 2 && budget - b <= 8) best = fmin(best, head_loss(q, 0, b) + head_loss(q, 1, budget - b));
    return best / all;
}

// Returns the mean of best_loss() over the pairs.
static double mean_best(double ratio)
{
    const case_question *a = CONTEXTS[0].questions, *b = CONTEXTS[1].questions;
    return (best_loss(&a[0], ratio) + best_loss(&a[1], ratio) + best_loss(&b[0], ratio)) / PAIRS;
}

UNIT_TEST(the_optimum_is_that_of_trying_all_budgets)
{
    validation *v = calloc(1, sizeof *v);
    study_options o = case_options("mean_ratio");
    double gained = 0;
    help_ok(validation_open(v, &from, "keydiff", &o, NULL, err));
    help_ok(validation_run(v, NULL, err));
    ck_assert_uint_eq(v->n_problems, PAIRS);
    for (int r = 0; r < ROWS; r++) {
        double expected = mean_best(o.ratios[r]);
        ck_near(v->optimum[r], expected);
        ck_assert_uint_eq(v->unproved[r], 0);
        ck_assert_double_le(v->optimum[r], v->greedy[r] + 1e-12);
        ck_assert_double_le(v->bound[r], v->optimum[r] + 1e-12);
        gained += v->greedy[r] - v->optimum[r];
    }
    ck_assert_double_gt(gained, 0.1); // else the case would be too easy
    validation_free(v);
    free(v);
}

UNIT_TEST(the_average_is_one_problem)
{
    validation *v = calloc(1, sizeof *v);
    study_options o = case_options("mean_loss");
    const double table[ROWS * 2] = {0}; // keeps everything
    help_ok(validation_open(v, &from, "keydiff", &o, table, err));
    help_ok(validation_run(v, NULL, err));
    ck_assert_uint_eq(v->n_problems, 1);
    for (int r = 0; r < ROWS; r++) {
        double single = mean_best(o.ratios[r]);
        ck_assert_double_ge(v->optimum[r], single - 1e-12); // common budgets lose no less than each pair's own
        ck_near(v->table_loss[r], 0);
    }
    validation_free(v);
    free(v);
}

UNIT_TEST(under_constraints_rows_of_the_options_count)
{
    validation *v = calloc(1, sizeof *v);
    study_options o = case_options("mean_ratio");
    kvb_limits limits;
    help_ok(kvb_limits_init(&limits, 1, 2, err));
    limits.block = 2;
    o.limits = &limits, o.n_rows = 1;
    for (int r = 0; r < ROWS; r++) o.ratios[r] = 0.5;
    help_ok(validation_open(v, &from, "keydiff", &o, NULL, err));
    help_ok(validation_run(v, NULL, err));
    ck_assert_double_ge(v->optimum[0], 0.01);
    ck_assert_double_le(v->optimum[0], v->greedy[0] + 1e-12);
    ck_assert_double_eq(v->optimum[1], 0);
    validation_free(v);
    free(v);
    kvb_limits_free(&limits);
}

UNIT_MAIN_EACH("study validation", setup, case_teardown)
