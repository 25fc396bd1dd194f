// Tables from any part of the pairs, taking a pair out again, and the names of options.
#include "study/pair_sums.h"
#include "study/progress.h"
#include "study/table.h"
#include "test_solver_cases.h"

enum { TOKENS = 12, PARTS = 3 };
static const cache_shape SHAPE = {1, 2, TOKENS, 1, 1};
static double RATIOS[2] = {0.25, 0.5};
static const solve_options OPTIONS = {HULL_FEASIBLE, SCOPE_GLOBAL, RATIOS, 2, NULL};
static kvb_error err;

// Makes a pair in which every token of head 0 has importance head_0, and every token of head 1 has head_1.
static void make_pair(problem *p, double head_0, double head_1)
{
    problem_init(p, &SHAPE, &OPTIONS);
    for (uint32_t i = 0; i < TOKENS - 2; i++) {
        p->curves.gain[i] = head_0;
        p->curves.gain[TOKENS - 2 + i] = head_1;
    }
    loss_curves_sum(&p->curves);
    must(problem_solve(p, &err), &err);
}

static void make_sums(pair_sums *sums, const double (*heads)[2], uint32_t n)
{
    pair_sums_init(sums, &SHAPE, 1024, 2);
    for (uint32_t i = 0; i < n; i++) {
        problem p;
        make_pair(&p, heads[i][0], heads[i][1]);
        must(pair_sums_add(sums, &p, &err), &err);
        problem_free(&p);
    }
}

UNIT_TEST(tables_of_one_part)
{
    pair_sums sums;
    double table[4];
    const pair_sums *parts[] = {&sums};
    make_sums(&sums, (const double[][2]){{1, 0}, {1, 0}, {0, 1}}, 3);
    must(pair_sums_mean_ratio(table, parts, 1, &err), &err);
    // 25 %: each pair prunes 6 of 12 of the head that it does not need.
    ck_assert_double_eq_tol(table[0], 0.5 / 3, 1e-12);
    ck_assert_double_eq_tol(table[1], 1.0 / 3, 1e-12);
    must(pair_sums_mean_loss(table, parts, 1, 0, &OPTIONS, &err), &err);
    ck_assert_double_eq_tol(table[0], 0, 1e-12); // head 0 is twice as important
    ck_assert_double_eq_tol(table[1], 0.5, 1e-12);
    must(pair_sums_tail(table, parts, 1, 0, &OPTIONS, &err), &err);
    ck_assert_double_eq_tol(table[1], 0.5, 1e-12); // the only text is the worst one
    pair_sums_free(&sums);
}

UNIT_TEST(parts_count_by_their_pairs)
{
    pair_sums sums[PARTS];
    double table[4];
    const pair_sums *parts[] = {&sums[0], &sums[1], &sums[2]};
    make_sums(&sums[0], (const double[][2]){{1, 0}}, 1);
    make_sums(&sums[1], (const double[][2]){{0, 1}, {0, 2}, {0, 5}}, 3);
    make_sums(&sums[2], NULL, 0);
    must(pair_sums_mean_ratio(table, parts, PARTS, &err), &err);
    ck_assert_double_eq_tol(table[0], 0.5 * 3 / 4, 1e-12);
    ck_assert_double_eq_tol(table[1], 0.5 / 4, 1e-12);
    must(pair_sums_tail(table, parts, PARTS, 0, &OPTIONS, &err), &err);
    ck_assert_double_eq_tol(table[0], 0.25, 1e-3); // there, each text counts the same
    ck_assert(pair_sums_mean_ratio(table, parts + 2, 1, &err) == KVB_ARGUMENT);
    ck_assert(pair_sums_mean_loss(table, parts, 0, 0, &OPTIONS, &err) == KVB_ARGUMENT);
    for (int i = 0; i < PARTS; i++) pair_sums_free(&sums[i]);
}

UNIT_TEST(limits_as_text_come_back)
{
    kvb_limits m, again;
    must(kvb_limits_init(&m, 2, 2, &err), &err);
    m.block = 16, m.levels = 2, m.by_layer = true, m.cap[1] = 0.7, m.least[2] = 0.1;
    m.most[3] = 0.9;
    char *text = limits_text(&m);
    ck_assert_ptr_nonnull(text);
    must(kvb_limits_parse(&again, text, 2, 2, "text", &err), &err);
    ck_assert(again.block == 16 && again.levels == 2 && again.ranks == m.ranks && again.by_layer);
    for (int l = 0; l < 2; l++) ck_assert_double_eq(again.cap[l], m.cap[l]);
    for (int h = 0; h < 4; h++) ck_assert(again.least[h] == m.least[h] && again.most[h] == m.most[h]);
    cJSON_free(text);
    kvb_limits_free(&again);
    m.cap[1] = m.most[3] = 1, m.least[2] = 0;
    text = limits_text(&m); // lists that limit nothing are left out
    ck_assert(text && !strstr(text, "cap") && !strstr(text, "least") && !strstr(text, "most"));
    cJSON_free(text);
    kvb_limits_free(&m);
}

UNIT_TEST(names_and_progress)
{
    study_options o = study_options_make();
    study_progress p = {.done = 7};
    unit_strings(scope_name(SCOPE_LAYER), "layer", scope_name(SCOPE_GLOBAL), "global", hull_name(HULL_FULL), "full",
                 hull_name(HULL_FEASIBLE), "feasible", order_name(true), "oracle", order_name(false), "metric");
    ck_assert(every_per_cent(&o));
    o.n_rows = 98;
    ck_assert(!every_per_cent(&o));
    study_progress_begin(&p, 5);
    ck_assert(p.done == 0 && p.total == 5);
    study_progress_begin(NULL, 5);
    ck_assert(study_progress_step(NULL) && study_progress_step(&p)); // without a listener it goes on
    double before = study_seconds();
    ck_assert_double_ge(study_seconds(), before);
}

UNIT_MAIN("study sums")
