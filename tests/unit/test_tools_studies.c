// What solve, validate, learn and recommend print of a study and add to their results: the study's own numbers, at the
// places where people and programs look for them. The studies are judged by test_study_*.c.
#include "study_help.h"
#include "tools/report/learn_report.h"
#include "tools/report/promise_report.h"
#include "tools/report/study_report.h"
#include "tools_help.h"

// Each text needs one head; at 25 % the table of one prunes 6 of the 10 that the other needs (test_study_studies.c).
static const case_context TEXTS[] = {
    {.id = "a", .n_tokens = 12, .n_questions = 2, .questions = {{9, {1, 0}, NULL}, {7, {2, 0}, NULL}}},
    {.id = "b", .n_tokens = 12, .n_questions = 1, .questions = {{9, {0, 1}, NULL}}},
    {.id = "none", .n_tokens = 40, .n_questions = 1, .questions = {{.n_queries = 0}}}};
enum { QUARTER = 24, HALF = 49 }; // rows of 25 and 50 %
static study_options o;
static results found;

static void setup(void)
{
    help_setup();
    case_select(&from, case_record("run.h5", TEXTS, 3));
    o = case_options("mean_loss");
    found = results_begin("test");
}

static void teardown(void)
{
    results_free(&found);
    case_teardown();
}

static void says(const char *what)
{
    ck_assert_msg(strstr(shown_text, what) != NULL, "no '%s' in: %s", what, shown_text);
}

// Returns a column's number in the first row with this ratio and, if `name` is given, `wanted` in column `name`.
static double value(const char *column, const char *name, double ratio, const char *wanted)
{
    const cJSON *row;
    cJSON_ArrayForEach(row, found.rows)
    {
        const cJSON *cell = name ? cJSON_GetObjectItem(row, name) : NULL;
        if (fabs(cJSON_GetNumberValue(cJSON_GetObjectItem(row, "ratio")) - ratio) > 1e-9) continue;
        if (!name || strcmp(cJSON_GetStringValue(cell), wanted) == 0)
            return cJSON_GetNumberValue(cJSON_GetObjectItem(row, column));
    }
    ck_abort_msg("no row at %g", ratio);
    return 0;
}

UNIT_TEST(of_a_table)
{
    study_table t;
    help_ok(study_table_open(&t, &from, "keydiff", &o, false, err));
    help_ok(study_table_solve(&t, NULL, err));
    ck_assert_str_eq(scope_words(SCOPE_LAYER), "layer by layer");
    SHOWN(1, print_table(&t));
    char row[64];
    snprintf(row, sizeof row, "    50 %%  %8.4f", 100 * t.table_loss[HALF]);
    says(row);
    says("keydiff: 3 questions on 2 contexts, sink 1, window 1");
    says(scope_words(o.scope));
    add_table(&found, &t);
    ck_near(value("table_loss", NULL, 0.5, NULL), t.table_loss[HALF]);
    ck_near(value("uniform_loss", NULL, 0.25, NULL), t.uniform_loss[QUARTER]);
    SHOWN(1, print_versus(&(versus){.compared = false}, &t));
    says("One text alone: nothing says");
    SHOWN(2, warn_of_pairs(&t.pairs));
    says("1 question without recorded queries is left out");
    says("7 to 9 recorded queries");
    SHOWN(2, warn_of_table(&t));
    ck_assert_str_eq(shown_text, "");
    t.table_loss[HALF] = t.uniform_loss[HALF] + 0.1;
    SHOWN(2, warn_of_table(&t));
    says("at 1 of 99 ratios, 50 to 50 %, this table loses more than uniform budgets");
    study_table_free(&t);
}

UNIT_TEST(of_texts_held_out)
{
    holdout *h = calloc(1, sizeof *h);
    help_ok(holdout_open(h, &from, "keydiff", &o, err));
    help_ok(holdout_run(h, NULL, err));
    SHOWN(1, print_holdout(h));
    says("keydiff: 3 questions on 2 texts, each text held out");
    says("2 texts: too few for intervals");
    add_holdout(&found, h);
    ck_near(value("loss", "allocator", 0.25, holdout_methods[METHOD_UNIFORM]), 0.3);
    ck_near(value("loss", "allocator", 0.25, holdout_methods[METHOD_PAPER]), 0.6);
    holdout_free(h);
    free(h);
}

UNIT_TEST(of_other_methods)
{
    ablation x;
    char row[64];
    help_ok(ablation_open(&x, &from, "keydiff", &o, err));
    help_ok(ablation_run(&x, NULL, err));
    SHOWN(1, print_ablation(&x));
    snprintf(row, sizeof row, "    25 %% %18.4f", 100 * x.loss[WAY_UNIFORM][4]);
    says(row);
    add_ablation(&found, &x);
    ck_near(value("loss", "allocator", 0.25, ablation_ways[WAY_UNIFORM]), 0.3);
    ck_near(value("loss", "allocator", 0.25, ablation_ways[WAY_OPTIMUM]), x.loss[WAY_OPTIMUM][4]);
    ablation_free(&x);
}

UNIT_TEST(of_a_validation)
{
    validation *v = calloc(1, sizeof *v);
    char row[64];
    help_ok(validation_open(v, &from, "keydiff", &o, NULL, err));
    help_ok(validation_run(v, NULL, err));
    SHOWN(1, print_validation(v));
    snprintf(row, sizeof row, "     50 %%  %9.5f  %9.5f  %9.5f", 100 * v->greedy[HALF], 100 * v->optimum[HALF],
             100 * v->bound[HALF]);
    says(row);
    ck_assert_ptr_null(strstr(shown_text, "NOT PROVED"));
    add_validation(&found, v);
    ck_near(value("optimum", NULL, 0.5, NULL), v->optimum[HALF]);
    ck_near(value("greedy", NULL, 0.25, NULL), v->greedy[QUARTER]);
    v->unproved[HALF] = 1;
    SHOWN(1, print_validation(v));
    says("NOT PROVED");
    validation_free(v);
    free(v);
}

// Writes the record's table and returns its path.
static const char *write_table(void)
{
    static char path[256];
    case_solve_to(&from, strcpy(path, help_path("t.safetensors")));
    return path;
}

UNIT_TEST(of_a_checked_table)
{
    table_check k;
    uint32_t faults = 7;
    const selection_request wanted = {.max_questions = UINT64_MAX};
    help_ok(table_check_open(&k, write_table(), from.path, &wanted, err));
    help_ok(table_check_run(&k, NULL, err));
    SHOWN(1, help_ok(report_table_check(&k, NULL, &faults, err)));
    ck_assert_uint_eq(faults, 0);
    says("99 of 99 rows hold against ");
    help_ok(report_table_check(&k, &found, &faults, err));
    ck_near(value("proved_bound", NULL, 0.5, NULL), k.bound[HALF]);
    k.table_loss[HALF] += 0.25; // as if the record said something else
    SHOWN(1, help_ok(report_table_check(&k, NULL, &faults, err)));
    ck_assert_uint_eq(faults, 1);
    says("  50 %: ");
    says("98 of 99 rows hold");
    table_check_free(&k);
}

UNIT_TEST(of_a_fit)
{
    learned *l = calloc(1, sizeof *l);
    l->from = &from, l->n_trials = 2, l->chosen = 1, l->n_folds = 2;
    l->trials[0] = (learn_trial){.loss = {0.5, 0.25, 0.125}};
    l->trials[1] = (learn_trial){.lambda = 0.5, .exponent = 0.25, .loss = {0.25, 0.125, 0.0625}};
    SHOWN(1, print_learned(l, "mine"));
    says("     50.00   25.00   12.50   keydiff\n");
    says("     25.00   12.50    6.25   keydiff\n");
    says("chosen: lambda 0.5, exponent 0.25");
    says("mine: 2 folds over 3 texts");
    cJSON *json = learned_to_json(l, "mine"), *trials = cJSON_GetObjectItem(json, "trials");
    ck_assert_int_eq(cJSON_GetArraySize(trials), 2);
    ck_near(cJSON_GetNumberValue(cJSON_GetObjectItem(json, "chosen")), 1);
    const cJSON *loss = cJSON_GetObjectItem(cJSON_GetArrayItem(trials, 1), "loss");
    ck_near(cJSON_GetNumberValue(cJSON_GetArrayItem(loss, 2)), 0.0625);
    cJSON_Delete(json);
    free(l);
}

// 200 texts lose nothing at 25 %, half of what counts at 50 %.
UNIT_TEST(of_a_promise)
{
    enum { N = 200 };
    static double losses[2 * N];
    static const double ratios[] = {0.25, 0.5};
    for (int i = 0; i < N; i++) losses[N + i] = 0.5;
    const promise_criterion limit = {0.1, 1, losses, "KL", "kl"};
    const promise_task task = {&limit, 1, 2, N, 0.1};
    kvb_table *table;
    promise_row rows[2];
    help_ok(kvb_table_open(&table, write_table(), NULL, err));
    promise_report r = {.task = &task,
                        .ratios = ratios,
                        .confidence = 0.9,
                        .table = table,
                        .n_tokens = 12,
                        .n_next = 3,
                        .length = 1000,
                        .rows = rows};
    help_ok(promise_find(&task, rows, &r.n_passed, err));
    ck_assert_uint_eq(r.n_passed, 1);
    SHOWN(1, help_ok(promise_report_print(&r, err)));
    says("Prune 25 %. With probability 0.9");
    says("KL is below 0.1 (a text counts as at most 1)");
    says("More texts would not help at 50 %");
    help_ok(promise_report_fill(&r, &found, err));
    ck_near(cJSON_GetNumberValue(cJSON_GetObjectItem(found.settings, "promised_ratio")), 0.25);
    ck_near(value("mean", NULL, 0.5, NULL), 0.5);
    ck_near(value("p", NULL, 0.5, NULL), rows[1].p);
    help_fails(promise_report_refusal(&r, err), KVB_UNSUPPORTED, "even 25 % pruned takes about");
    memset(losses, 0, sizeof losses);
    for (int i = 0; i < N; i++) losses[i] = 0.5;
    help_fails(promise_report_refusal(&r, err), KVB_UNSUPPORTED, "mean damage is above the limit already");
    kvb_table_close(table);
}

UNIT_MAIN_EACH("tools_studies", setup, teardown)
