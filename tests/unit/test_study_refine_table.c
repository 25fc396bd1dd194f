// Refined tables: shift 0 is the table itself, totals do not change, and the file says how it was found and is valid.
#include "study/refine_table.h"
#include "study/table_check.h"
#include "study_help.h"

static const float EASY[12] = {0, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 0}, FLAT[12] = {0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0};
static const case_context CONTEXTS[] = {
    {.id = "a", .n_tokens = 12, .n_questions = 1, .questions = {{9, {0, 1}, EASY}}},
    {.id = "b", .n_tokens = 12, .n_questions = 1, .questions = {{9, {0, 2}, FLAT}}}};
static const double KNOTS[2] = {0.3, 0.6};

static void write_table(const char *run, const char *path)
{
    case_select(&from, run);
    case_solve_to(&from, path);
    selection_close(&from);
}

static void budgets(const kvb_table *table, double ratio, uint32_t keep[CASE_HEADS])
{
    help_ok(kvb_budgets(table, ratio, 1000, NULL, keep, CASE_HEADS, err));
}

UNIT_TEST(a_refined_table_is_a_table)
{
    char run[256], path[256], refined[256];
    snprintf(run, sizeof run, "%s", case_record("run.h5", CONTEXTS, 2));
    snprintf(path, sizeof path, "%s", help_path("table.safetensors"));
    snprintf(refined, sizeof refined, "%s", help_path("refined.safetensors"));
    write_table(run, path);
    kvb_table *table, *same, *other, *read;
    refine_table t;
    double shift[2 * CASE_HEADS] = {0};
    help_ok(kvb_table_open(&table, path, NULL, err));
    help_ok(refine_table_open(&t, table, path, err));
    help_ok(refine_table_apply(&t, KNOTS, 2, shift, &same, err));
    for (int k = 0; k < 2; k++) shift[k * CASE_HEADS] = -1.5; // head 0 keeps more
    help_ok(refine_table_apply(&t, KNOTS, 2, shift, &other, err));
    cJSON *about = cJSON_Parse("{\"search\":\"by hand\"}"), *nothing = cJSON_CreateObject();
    help_ok(refine_table_write(&t, KNOTS, 2, shift, about, refined, err));
    help_ok(kvb_table_open(&read, refined, NULL, err));
    uint32_t moved = 0;
    for (int per_cent = 1; per_cent < 100; per_cent++) {
        uint32_t keep[4][CASE_HEADS];
        kvb_table *const all[4] = {table, same, other, read};
        for (int i = 0; i < 4; i++) budgets(all[i], per_cent / 100.0, keep[i]);
        ck_assert(memcmp(keep[0], keep[1], sizeof keep[0]) == 0 && memcmp(keep[2], keep[3], sizeof keep[0]) == 0);
        ck_assert_uint_eq(keep[0][0] + keep[0][1], keep[2][0] + keep[2][1]);
        ck_assert_uint_ge(keep[2][0], keep[0][0]);
        moved += keep[2][0] - keep[0][0];
    }
    ck_assert_uint_gt(moved, 0);
    unit_strings(kvb_table_metadata(read, "refined"), "{\"search\":\"by hand\"}", kvb_table_metadata(read, "unknown"),
                 "table_loss");
    // Refined once more: the first description is replaced.
    refine_table again;
    help_ok(refine_table_open(&again, read, refined, err));
    help_ok(refine_table_write(&again, KNOTS, 2, shift, nothing, path, err));
    kvb_table_close(table);
    help_ok(kvb_table_open(&table, path, NULL, err));
    ck_assert_str_eq(kvb_table_metadata(table, "refined"), "{}");
    refine_table_free(&again);
    cJSON_Delete(about);
    cJSON_Delete(nothing);
    refine_table_free(&t);
    kvb_table *const all[4] = {table, same, other, read};
    for (int i = 0; i < 4; i++) kvb_table_close(all[i]);
}

UNIT_TEST(its_bounds_are_still_true)
{
    char run[256], path[256];
    snprintf(run, sizeof run, "%s", case_record("bounds.h5", CONTEXTS, 2));
    snprintf(path, sizeof path, "%s", help_path("bounds.safetensors"));
    write_table(run, path);
    kvb_table *table;
    refine_table t;
    const double shift[2 * CASE_HEADS] = {0.5, -0.5, 1, -1};
    help_ok(kvb_table_open(&table, path, NULL, err));
    help_ok(refine_table_open(&t, table, path, err));
    cJSON *about = cJSON_CreateObject();
    help_ok(refine_table_write(&t, KNOTS, 2, shift, about, path, err));
    cJSON_Delete(about);
    table_check k;
    const selection_request all = {.max_questions = UINT64_MAX};
    help_ok(table_check_open(&k, path, run, &all, err));
    help_ok(table_check_run(&k, NULL, err));
    for (uint32_t r = 0; r < k.options.n_rows; r++) {
        kvb_row row;
        help_ok(kvb_table_row(k.table, r, &row, err));
        ck_assert_ptr_null(table_check_fault(&k, &row, r));
    }
    table_check_free(&k);
    refine_table_free(&t);
    kvb_table_close(table);
}

UNIT_MAIN_ONCE("study/refine_table", help_setup, help_teardown)
