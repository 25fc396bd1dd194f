// Leave-one-out losses, other lengths, other methods: on texts of which each needs one head alone, so that what a table
// loses on a text that it has not seen can be counted by hand.
#include "study/ablation.h"
#include "study/holdout.h"
#include "study/lengths.h"
#include "study_help.h"

// T = 12, protected 1 + 1. Text a needs head 0 only, b head 1 only. At 25 % the table of one prunes 6 of the
// other's 10.
static const case_context TEXTS[] = {
    {.id = "a", .n_tokens = 12, .n_questions = 2, .questions = {{9, {1, 0}, NULL}, {9, {2, 0}, NULL}}},
    {.id = "b", .n_tokens = 12, .n_questions = 1, .questions = {{9, {0, 1}, NULL}}},
    {.id = "none", .n_tokens = 40, .n_questions = 1, .questions = {{.n_queries = 0}}}};
static const case_context LONGER[] = {
    {.id = "b", .n_tokens = 24, .n_questions = 1, .questions = {{9, {0, 1}, NULL}}},
    {.id = "a", .n_tokens = 24, .n_questions = 2, .questions = {{9, {1, 0}, NULL}, {9, {2, 0}, NULL}}}};
enum { QUARTER = 24 }; // row of 25 %
static selection from;
static study_options o;

static void setup(void)
{
    help_setup();
    case_select(&from, case_record("run.h5", TEXTS, 3));
    o = case_options("mean_loss");
}

static void teardown(void)
{
    selection_close(&from);
    help_teardown();
}

// ---- Holdout --------------------------------------------------------------------------------------------------------

START_TEST(texts_held_out)
{
    holdout *h = calloc(1, sizeof *h);
    help_ok(holdout_open(h, &from, "keydiff", &o, err));
    help_ok(holdout_run(h, NULL, err));
    ck_assert(h->n_texts == 2 && h->n_pairs == 3 && h->first[1] == 2);
    int r = QUARTER;
    ck_near(h->mean[r][METHOD_UNIFORM].value, 0.3); // 9 of 12 stay
    ck_near(h->mean[r][METHOD_PAPER].value, 0.6);   // made from the other text alone
    ck_near(h->mean[r][METHOD_MEAN_LOSS].value, 0.6);
    ck_near(h->mean[r][METHOD_WORST].value, 0.6);
    ck_near(h->mean[r][METHOD_OPTIMUM].value, 0);
    ck_near(h->ratio[r][METHOD_UNIFORM].value, -0.5);
    int at = 0;
    ck_assert_double_le(holdout_worst_change(h, METHOD_MEAN_LOSS, &at), 1e-9); // the same tables
    holdout_free(h);
    free(h);
}
END_TEST

START_TEST(one_text_cannot_be_held_out)
{
    holdout *h = calloc(1, sizeof *h);
    selection one;
    const selection_request a = {CASE_METRIC, 1, "a,none", UINT64_MAX, NULL};
    help_ok(selection_open(&one, from.path, &a, err));
    help_fails(holdout_open(h, &one, "keydiff", &o, err), KVB_ARGUMENT, "at least 2 texts with questions");
    holdout_free(h);
    selection_close(&one);
    free(h);
}
END_TEST

// ---- Lengths --------------------------------------------------------------------------------------------------------

static kvb_status open_lengths(lengths *x, const char *second, const char *ids, kvb_error *err)
{
    static char paths[2][256];
    char *const all[] = {strcpy(paths[0], from.path), strcpy(paths[1], second)};
    const selection_request wanted = {CASE_METRIC, 1, ids, UINT64_MAX, NULL};
    return lengths_open(x, all, 2, &wanted, &o, err);
}

START_TEST(tables_at_another_length)
{
    lengths *x = calloc(1, sizeof *x);
    help_ok(open_lengths(x, case_record("long.h5", LONGER, 2), "a,b", err));
    for (uint32_t k = 0; k < 2; k++) help_ok(lengths_read(x, k, NULL, err));
    help_ok(lengths_fit(x, err));
    for (uint32_t k = 0; k < 2; k++) help_ok(lengths_judge(x, k, NULL, err));
    ck_assert(x->n_texts == 2 && x->n_cuts == 2 && x->n_pairs == 6);
    ck_assert_str_eq(x->cuts[1].name, "24");
    ck_assert_str_eq(selection_context(&x->cuts[1].from, 0)->id, "a"); // in the first record's order
    ck_assert_str_eq(x->names[0], "a 12");
    ck_assert_str_eq(x->names[1], "a 24");
    ck_assert_str_eq(lengths_source(x, 3), "all but this");
    // The text held out needs the head that the other gives up: 25 % is 6 of 12, or 12 of 24 with 22 that count.
    ck_near(x->loss[0][0][QUARTER], 0.6);
    ck_near(x->loss[1][1][QUARTER], 12.0 / 22);
    ck_near(x->loss[3][0][QUARTER], x->loss[1][0][QUARTER]); // all but this is the other
    ck_near(lengths_change(x, 0, 0, QUARTER), 0);
    // A text's own table, at its own length and at the other one.
    ck_near(x->transfer[QUARTER * 16], 0);
    ck_near(x->transfer[QUARTER * 16 + 1], 0);
    ck_near(x->transfer[QUARTER * 16 + 2], 0.6); // and on b
    ck_near(lengths_regret(x, 0, 0, 49), 0);
    ck_assert_double_gt(lengths_regret(x, 0, 2, 49), 3);
    lengths_free(x);
    free(x);
}
END_TEST

START_TEST(records_that_do_not_belong_together)
{
    lengths *x = calloc(1, sizeof *x);
    const case_context other[] = {LONGER[0],
                                  {.id = "c", .n_tokens = 24, .n_questions = 1, .questions = {{9, {1, 0}, 0}}}};
    char *const single[] = {NULL};
    const selection_request wanted = {CASE_METRIC, 1, NULL, UINT64_MAX, NULL};
    help_fails(lengths_open(x, single, 1, &wanted, &o, err), KVB_ARGUMENT, "one for each length, found 1");
    lengths_free(x);
    help_fails(open_lengths(x, case_record("other.h5", other, 2), NULL, err), KVB_MISMATCH,
               "other.h5: has no context a");
    lengths_free(x);
    help_fails(open_lengths(x, from.path, "a", err), KVB_ARGUMENT, "expected 2 to 16 contexts");
    lengths_free(x);
    help_fails(open_lengths(x, from.path, "a,none", err), KVB_ARGUMENT, "1 of 2 contexts have no question");
    lengths_free(x);
    cJSON *a = case_attributes(CASE_PROTECTED);
    cJSON_ReplaceItemInObject(a, "model_sha256", cJSON_CreateString(CASE_MODEL("0000")));
    const char *path = strcpy((char[256]){0}, help_path("model.h5"));
    case_write(path, a, LONGER, 2, CASE_METRIC, 1);
    help_fails(open_lengths(x, path, "a,b", err), KVB_MISMATCH, "are of different models");
    lengths_free(x);
    free(x);
}
END_TEST

// ---- Ablation -------------------------------------------------------------------------------------------------------

// The metric ranks early tokens first; what counts is the last one.
static const float LATE[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0};
static const case_context RANKED[] = {
    {.id = "good", .n_tokens = 12, .n_questions = 1, .questions = {{9, {1, 0}, NULL}}},
    {.id = "bad", .n_tokens = 12, .n_questions = 1, .questions = {{9, {0, 0.125F}, LATE}}}};

static void ablate(ablation *x, const char *id)
{
    selection one;
    const selection_request wanted = {CASE_METRIC, 1, id, UINT64_MAX, NULL};
    help_ok(selection_open(&one, case_record("ranked.h5", RANKED, 2), &wanted, err));
    help_ok(ablation_open(x, &one, "keydiff", &o, err));
    help_ok(ablation_run(x, NULL, err));
    for (int w = 0; w < N_WAYS; w++)
        for (int r = 0; r < ABLATION_RATIOS; r++)
            ck_near(x->loss[w][r], x->head_loss[w][2 * r] + x->head_loss[w][2 * r + 1]);
    selection_close(&one);
    unlink(help_path("ranked.h5"));
}

START_TEST(budgets_of_other_methods)
{
    ablation x;
    enum { AT = 4 }; // 25 %
    ablate(&x, "good");
    ck_near(x.ratios[AT], 0.25);
    ck_near(x.loss[WAY_UNIFORM][AT], 0.3);
    ck_near(x.loss[WAY_PYRAMID][AT], 0.3); // one layer
    ck_near(x.loss[WAY_OPTIMUM][AT], 0);
    ck_near(x.loss[WAY_NO_GAP][AT], 0); // all tokens count alike: no ranking is better
    ablation_free(&x);
    // The metric throws away head 0's only token first, so that the head is useful only if it keeps all; whoever
    // believes in its ranking takes six others of it, and loses 4 of 4 + 10 / 8.
    ablate(&x, "bad");
    ck_near(x.loss[WAY_OPTIMUM][AT], 6.0 / 8 / 5.25);
    ck_near(x.head_loss[WAY_OPTIMUM][2 * AT], 0);
    ck_near(x.loss[WAY_NO_GAP][AT], 4 / 5.25);
    ck_near(x.loss[WAY_UNIFORM][AT], (4 + 3.0 / 8) / 5.25);
    ablation_free(&x);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, texts_held_out);
    tcase_add_test(tc, one_text_cannot_be_held_out);
    tcase_add_test(tc, tables_at_another_length);
    tcase_add_test(tc, records_that_do_not_belong_together);
    tcase_add_test(tc, budgets_of_other_methods);
}
UNIT_MAIN("study studies", fill)
