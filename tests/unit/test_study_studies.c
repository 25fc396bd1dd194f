// Leave-one-out losses and ways to set budgets, on texts that each need one head alone, so that what a table loses on a
// text that it has not seen can be counted by hand.
#include "study/ablation.h"
#include "study/holdout.h"
#include "study_help.h"

// T = 12, protected 1 + 1. Text a needs head 0 only, b head 1 only. At 25 % the table made from one text prunes 6 of
// the 10 tokens that the other one needs.
static const case_context TEXTS[] = {
    {.id = "a", .n_tokens = 12, .n_questions = 2, .questions = {{9, {1, 0}, NULL}, {9, {2, 0}, NULL}}},
    {.id = "b", .n_tokens = 12, .n_questions = 1, .questions = {{9, {0, 1}, NULL}}},
    {.id = "none", .n_tokens = 40, .n_questions = 1, .questions = {{.n_queries = 0}}}};
enum { QUARTER = 24 }; // row of 25 %
static study_options o;

static void setup(void)
{
    help_setup();
    case_select(&from, case_record("run.h5", TEXTS, 3));
    o = case_options("mean_loss");
}

// ---- Holdout --------------------------------------------------------------------------------------------------------

UNIT_TEST(texts_held_out)
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

UNIT_TEST(one_text_cannot_be_held_out)
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

// ---- Ablation -------------------------------------------------------------------------------------------------------

// The metric ranks early tokens first, but only the last one matters.
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

UNIT_TEST(budgets_of_other_methods)
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
    // The metric drops head 0's only useful token first, so the head is useful only if it keeps all. Budgets that trust
    // the ranking take six tokens of head 0, and lose 4 of 4 + 10 / 8.
    ablate(&x, "bad");
    ck_near(x.loss[WAY_OPTIMUM][AT], 6.0 / 8 / 5.25);
    ck_near(x.head_loss[WAY_OPTIMUM][2 * AT], 0);
    ck_near(x.loss[WAY_NO_GAP][AT], 4 / 5.25);
    ck_near(x.loss[WAY_UNIFORM][AT], (4 + 3.0 / 8) / 5.25);
    ablation_free(&x);
}

UNIT_MAIN_EACH("study studies", setup, case_teardown)
