// Tables from records with known best budgets, their files, and the check of their bounds.
#include "study/table_check.h"
#include "study_help.h"

// T = 12, protected 1 + 1, floor 2: a head that is never needed gives up 10 tokens before the other gives up one.
static const case_context HEAD_0 = {.id = "a", .n_tokens = 12, .n_questions = 1, .questions = {{9, {1, 0}, NULL}}};
static const case_context HEAD_1 = {.id = "b", .n_tokens = 12, .n_questions = 1, .questions = {{9, {0, 1}, NULL}}};
static void open_record(const char *name, const case_context *contexts, size_t n)
{
    case_select(&from, case_record(name, contexts, n));
}

static void solve(study_table *t, const study_options *o)
{
    help_ok(study_table_open(t, &from, "keydiff", o, true, err));
    help_ok(study_table_solve(t, NULL, err));
}

UNIT_TEST(one_pair_with_a_useless_head)
{
    study_table t;
    study_options o = case_options("mean_ratio");
    open_record("one.h5", &HEAD_0, 1);
    solve(&t, &o);
    // 25 %: 6 of 24 go, all from head 1. 50 %: 10 from head 1, 2 from head 0, a share of 2/10.
    ck_near(t.prune_ratio[2 * 24], 0);
    ck_near(t.prune_ratio[2 * 24 + 1], 0.5);
    ck_near(t.loss[24], 0);
    ck_near(t.prune_ratio[2 * 49], 2.0 / 12);
    ck_near(t.prune_ratio[2 * 49 + 1], 10.0 / 12);
    ck_near(t.loss[49], 0.2);
    ck_near(t.bound[49], 0.2); // the hull is the curve: proved
    ck_near(t.table_loss[49], 0.2);
    ck_near(t.uniform_loss[49], 0.6); // 6 of 12 each: head 0 loses 6 of its 10
    ck_near(t.effective[49], 0.5);
    unit_numbers(t.pair_budgets[2 * 49], 10, t.pair_budgets[2 * 49 + 1], 2);
    ck_near(t.std[2 * 49], 0);
    ck_assert(!t.saturated[49] && t.saturated[98]); // 2 + 2 of 24 stay: 83 % at most
    ck_near(t.effective[98], 20.0 / 24);
    study_table_free(&t);
}

UNIT_TEST(aggregations_of_two_opposite_pairs)
{
    study_table t;
    const case_context both[] = {HEAD_0, HEAD_1};
    open_record("two.h5", both, 2);
    study_options o = case_options("mean_ratio");
    solve(&t, &o);
    ck_near(t.prune_ratio[2 * 24], 0.25); // of 0 and 0.5
    ck_near(t.std[2 * 24], 0.25);
    ck_near(t.loss[24], 0);         // each pair's own
    ck_near(t.table_loss[24], 0.3); // 9 of 12 stay
    ck_near(t.table_bound[24], 0);  // each pair's own
    study_table_free(&t);
    o = case_options("mean_loss");
    solve(&t, &o);
    ck_near(t.loss[24], 0.3); // 6 tokens of 20, half of the mass each
    ck_near(t.bound[24], 0.3);
    ck_near(t.table_loss[24], 0.3);
    ck_near(t.std[2 * 24], 0.25); // still how far the pairs' own optima spread
    ck_near(t.table_bound[24], 0.3);
    study_table_free(&t);
    o.shrink = 0.5; // flatter curves are solved, so this loses less than a table can; the bound is the table's
    solve(&t, &o);
    for (int r = 0; r < ROWS; r++) ck_assert_double_le(t.table_bound[r], t.table_loss[r] + 1e-9);
    ck_near(t.table_bound[24], 0.3);
    study_table_free(&t);
    o = case_options("worst");
    solve(&t, &o);
    ck_near(t.prune_ratio[2 * 24], 0.25); // with any others, one text loses more than 0.3
    ck_near(t.loss[24], 0.3);
    ck_assert_uint_eq(t.n_texts, 2);
    ck_assert(isnan(t.table_bound[24])); // a mean gives no bound for the worst text
    ck_near(t.text_weights[2 * 24] + t.text_weights[2 * 24 + 1], 1);
    study_table_free(&t);
}

UNIT_TEST(pairs_that_cannot_lose_anything_count)
{
    const case_context nothing = {.id = "n", .n_tokens = 12, .n_questions = 1, .questions = {{9, {0, 0}, NULL}}};
    const case_context both[] = {HEAD_0, nothing};
    open_record("none.h5", both, 2);
    for (int i = 0; i < 2; i++) {
        study_table t;
        study_options o = case_options(i % 2 ? "mean_loss" : "mean_ratio");
        solve(&t, &o);
        ck_near(t.loss[49], 0.1); // 0.2 of one of two
        ck_assert_double_le(t.bound[49], 0.1 + 1e-12);
        ck_near(t.uniform_loss[49], 0.3);
        study_table_free(&t);
    }
}

// Head 0 needs its last chosen token only, which the metric ranks last: greedy's hull does not see the step.
static const float STEP[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0};
static const case_context STEPS = {.id = "s", .n_tokens = 12, .n_questions = 1, .questions = {{9, {0, 1}, STEP}}};

UNIT_TEST(exact_budgets_lose_no_more_than_greedy)
{
    study_table greedy, exact, perfect;
    study_options o = case_options("mean_loss");
    open_record("step.h5", &STEPS, 1);
    solve(&greedy, &o);
    o.exact = true;
    solve(&exact, &o);
    o.exact = false, o.oracle_order = true;
    solve(&perfect, &o);
    for (int r = 0; r < ROWS; r++) {
        ck_assert_double_le(exact.loss[r], greedy.loss[r] + 1e-12);
        ck_near(exact.greedy[r], greedy.loss[r]);
        ck_near(exact.optimum[r], exact.loss[r]);
        ck_assert(!exact.unproved[r]);
        ck_assert_double_le(perfect.loss[r], exact.loss[r] + 1e-12);
    }
    // 20 %: 5 of 24 tokens go. In head 1 they cost 5 of 15; in head 0, dropping the last one costs 5 too.
    ck_near(exact.loss[19], 5.0 / 15);
    ck_near(perfect.loss[19], 0); // but 9 others of head 0 could go
    study_table_free(&greedy);
    study_table_free(&exact);
    study_table_free(&perfect);
}

UNIT_TEST(ratios_of_ones_own_must_be_allowed)
{
    study_table t;
    kvb_limits limits;
    study_options o = case_options("mean_loss");
    open_record("one.h5", &HEAD_0, 1);
    help_ok(kvb_limits_init(&limits, 1, 2, err));
    limits.least[0] = 0.9;
    o.limits = &limits, o.own_ratios = true, o.n_rows = 1;
    for (int r = 0; r < ROWS; r++) o.ratios[r] = 0.7;
    help_ok(study_table_open(&t, &from, "keydiff", &o, false, err));
    help_fails(study_table_solve(&t, NULL, err), KVB_ARGUMENT, "0.7");
    study_table_free(&t);
    for (int r = 0; r < ROWS; r++) o.ratios[r] = 0.3;
    help_ok(study_table_open(&t, &from, "keydiff", &o, false, err));
    help_ok(study_table_solve(&t, NULL, err));
    ck_assert_double_le(t.prune_ratio[0], 0.1);
    ck_assert_ptr_null(t.pair_budgets);
    study_table_free(&t);
    kvb_limits_free(&limits);
}

// ---- Files ----------------------------------------------------------------------------------------------------------

UNIT_TEST(the_file_says_how_it_was_made)
{
    study_table t;
    kvb_table *table;
    const case_context both[] = {HEAD_0, HEAD_1};
    open_record("two.h5", both, 2);
    study_options o = case_options("cvar:0.5"), again;
    kvb_limits limits = {0};
    o.scope = SCOPE_LAYER, o.shrink = 0.25, o.min_keep = 0.2;
    solve(&t, &o);
    case_save(&t, help_path("t.safetensors"));
    help_ok(kvb_table_open(&table, help_path("t.safetensors"), NULL, err));
    const kvb_info *info = kvb_table_info(table);
    unit_strings(info->metric, "keydiff", info->aggregate, "cvar:0.5", info->scope, "layer");
    unit_numbers(info->n_questions, 2, info->sink, 1);
    unit_strings(kvb_table_metadata(table, "calibration_tokens"), "12,12", kvb_table_metadata(table, "n_queries"),
                 "9,9");
    ck_assert_ptr_null(kvb_table_metadata(table, "n_rows"));
    help_ok(study_options_from_table(&again, &limits, table, "t", err));
    ck_assert(again.aggregate == AGGREGATE_TAIL && again.scope == SCOPE_LAYER && !again.limits && !again.own_ratios);
    ck_assert(again.tail == 0.5 && again.shrink == 0.25 && again.min_keep == 0.2 && again.sink == 1);
    ck_assert_uint_eq(again.n_rows, ROWS);
    kvb_table_close(table);
    help_ok(study_table_write_budgets(&t, help_path("b.npy"), err));
    ck_assert(help_exists(help_path("b.npy")));
    study_table_free(&t);
}

UNIT_TEST(aggregations_by_name)
{
    static const char *const wrong[] = {"",         "mean",      "cvar",     "cvar:", "cvar:0",
                                        "cvar:1.1", "cvar:0.5x", "cvar:nan", "Worst"};
    study_options o = case_options("cvar:1");
    ck_assert(o.aggregate == AGGREGATE_TAIL && o.tail == 1);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        help_fails(study_options_aggregate(&o, wrong[i], err), KVB_ARGUMENT, "cvar:A with 0 < A <= 1");
}

// ---- Checking -------------------------------------------------------------------------------------------------------

// Returns how many rows of the table at `path` do not hold, each because of `fault`.
static uint32_t count_faults(const char *path, const char *fault)
{
    uint32_t n = 0;
    table_check *k = calloc(1, sizeof *k);
    const selection_request all = {NULL, 0, NULL, UINT64_MAX, NULL};
    help_ok(table_check_open(k, path, from.path, &all, err));
    help_ok(table_check_run(k, NULL, err));
    help_ok(table_check_limits(k, err));
    for (uint32_t r = 0; r < k->options.n_rows; r++) {
        kvb_row row;
        help_ok(kvb_table_row(k->table, r, &row, err));
        const char *found = table_check_fault(k, &row, r);
        if (found) ck_assert_str_eq(found, fault);
        n += found != NULL;
    }
    table_check_free(k);
    free(k);
    return n;
}

UNIT_TEST(bounds_hold_and_wrong_ones_are_found)
{
    static const char *const how[] = {"mean_ratio", "mean_loss", "worst", "cvar:0.6"};
    const case_context all[] = {HEAD_0, STEPS, HEAD_1};
    open_record("three.h5", all, 3);
    for (int i = 0; i < 4; i++) {
        study_table t;
        study_options o = case_options(how[i]);
        o.shrink = i * 0.1, o.oracle_order = i == 1;
        solve(&t, &o);
        case_save(&t, help_path("t.safetensors"));
        ck_assert_uint_eq(count_faults(help_path("t.safetensors"), ""), 0);
        t.table_loss[30] += 1e-6;
        case_save(&t, help_path("t.safetensors"));
        ck_assert_uint_eq(count_faults(help_path("t.safetensors"), "the table's own loss is another"), 1);
        t.table_loss[30] -= 1e-6;
        t.loss[60] += 1e-3;
        t.bound[60] = t.loss[60];
        case_save(&t, help_path("t.safetensors"));
        ck_assert_uint_eq(count_faults(help_path("t.safetensors"), "no multiplier proves the bound"), 1);
        study_table_free(&t);
    }
}

UNIT_TEST(a_table_of_another_record_is_refused)
{
    study_table t;
    table_check *k = calloc(1, sizeof *k);
    const selection_request all = {NULL, 0, NULL, UINT64_MAX, NULL}, one = {NULL, 0, "b", UINT64_MAX, NULL};
    const case_context both[] = {HEAD_0, HEAD_1};
    study_options o = case_options("mean_loss");
    open_record("two.h5", both, 2);
    solve(&t, &o);
    case_save(&t, help_path("t.safetensors"));
    const char *other = case_record("one.h5", &HEAD_1, 1);
    help_fails(table_check_open(k, help_path("t.safetensors"), other, &all, err), KVB_MISMATCH, "from another record");
    table_check_free(k);
    help_fails(table_check_open(k, help_path("t.safetensors"), from.path, &one, err), KVB_MISMATCH,
               "from 2 questions on 2 contexts, but 1 on 1");
    table_check_free(k);
    free(k);
    study_table_free(&t);
}

// A table's file says what it was solved for, and a record of another model or shape is refused.
UNIT_TEST(a_table_opens_with_its_record)
{
    study_table t;
    kvb_table *table = NULL;
    study_options o = case_options("worst"), again;
    kvb_limits limits = {0};
    selection opened = {0};
    const selection_request all = {NULL, 0, NULL, UINT64_MAX, NULL};
    open_record("one.h5", &HEAD_0, 1);
    solve(&t, &o);
    case_save(&t, help_path("t.safetensors"));
    help_ok(open_table_and_record(&table, &again, &limits, &opened, help_path("t.safetensors"), from.path, &all, err));
    unit_numbers(again.aggregate, o.aggregate, again.n_rows, ROWS, opened.n_metrics, 1);
    ck_assert_str_eq(opened.metrics[0], "keydiff");
    kvb_table_close(table);
    kvb_limits_free(&limits);
    selection_close(&opened);
    table = NULL, limits = (kvb_limits){0}, opened = (selection){0};
    const char *strange = help_path("strange.h5"), *const metrics[] = {"keydiff"};
    cJSON *attributes = case_attributes(NULL);
    cJSON_ReplaceItemInObject(attributes, "model_sha256", cJSON_CreateString(CASE_MODEL("CD34")));
    case_write(strange, attributes, &HEAD_0, 1, metrics, 1);
    help_fails(open_table_and_record(&table, &again, &limits, &opened, help_path("t.safetensors"), strange, &all, err),
               KVB_MISMATCH, "model");
    kvb_table_close(table);
    kvb_limits_free(&limits);
    selection_close(&opened);
    study_table_free(&t);
}

UNIT_MAIN_EACH("study table", help_setup, case_teardown)
