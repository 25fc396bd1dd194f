// Records that leave out layers with bounded caches: which of the model's layers they have, and their tables.
#include "study/layer_map.h"
#include "study/table_check.h"
#include "study_help.h"

static const case_context TEXT = {.id = "a", .n_tokens = 12, .n_questions = 1, .questions = {{9, {1, 0}, NULL}}};
// Opens a record of one layer that names the model's other, bounded layers.
static void open_record(const char *name, const char *bounded)
{
    cJSON *attributes = case_attributes(CASE_PROTECTED);
    cJSON_AddStringToObject(attributes, "bounded_layers", bounded);
    case_write(help_path("%s", name), attributes, &TEXT, 1, CASE_METRIC, 1);
    case_select(&from, help_path("%s", name));
}

UNIT_TEST(map_of_a_record)
{
    layer_map m;
    double *all;
    const double values[] = {1, 2, 3, 4};
    open_record("three.h5", "0,2");
    help_ok(layer_map_read(&m, from.r, err));
    ck_assert(m.n_layers == 3 && m.n_budgeted == 1 && m.bounded[0] && !m.bounded[1] && m.bounded[2]);
    ck_assert(layer_map_place(&m, 0) == UINT32_MAX && layer_map_place(&m, 1) == 0);
    all = layer_map_spread(&m, values, 2, 2);
    const double want[] = {0, 0, 1, 2, 0, 0, 0, 0, 3, 4, 0, 0};
    for (int i = 0; i < 12; i++) ck_assert_double_eq(all[i], want[i]);
    free(all);
    layer_map_free(&m);
}

UNIT_TEST(a_list_that_cannot_be)
{
    static const char *const lists[] = {"1,0", "0,0", "0,7", "x", "0,", "-1", "0;1"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        layer_map m;
        char name[16];
        snprintf(name, sizeof name, "%zu.h5", i);
        open_record(name, lists[i]);
        help_fails(layer_map_read(&m, from.r, err), KVB_FORMAT, "bounded_layers");
        layer_map_free(&m);
        selection_close(&from);
        from = (selection){0};
    }
}

// The table has a row for every layer of the model, solves the budgeted one, and is checked against its record.
UNIT_TEST(table_of_all_layers)
{
    kvb_table *table;
    open_record("one.h5", "0,2");
    case_solve_to(&from, help_path("t.safetensors"));
    help_ok(kvb_table_open(&table, help_path("t.safetensors"), NULL, err));
    const kvb_info *info = kvb_table_info(table);
    ck_assert(info->n_layers == 3 && info->n_budgeted == 1 && info->bounded[0] && !info->bounded[1]);
    uint32_t keep[6];
    kvb_budget_summary sum;
    help_ok(kvb_budgets(table, 0.5, 12, NULL, keep, 6, err));
    help_ok(kvb_budgets_summarize(table, 0.5, 12, NULL, keep, 6, &sum, err));
    const uint32_t want[] = {12, 12, 10, 2, 12, 12}; // head 1 of the middle layer was never needed
    for (int i = 0; i < 6; i++) ck_assert_uint_eq(keep[i], want[i]);
    ck_assert_uint_eq(sum.total, 12);
    ck_assert_double_eq_tol(sum.effective_ratio, 0.5, 1e-12);
    kvb_table_close(table);
    table_check k;
    const selection_request wanted = {.max_questions = UINT64_MAX};
    help_ok(table_check_open(&k, help_path("t.safetensors"), help_path("one.h5"), &wanted, err));
    help_ok(table_check_run(&k, NULL, err));
    table_check_free(&k);
    selection_close(&from);
    open_record("other.h5", "0,1");
    help_fails(table_check_open(&k, help_path("t.safetensors"), help_path("other.h5"), &wanted, err), KVB_MISMATCH,
               "bounded layers");
    table_check_free(&k);
}

UNIT_MAIN_EACH("study layers", help_setup, case_teardown)
