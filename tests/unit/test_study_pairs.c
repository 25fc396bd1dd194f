// Walking the pairs of a record: which ones, in which order, with which curves; stopping; judging a table by them; and
// averages over them.
#include "runtime/fail.h"
#include "study/gather.h"
#include "study_help.h"

// Tokens 1 .. T - 2 can be chosen; the metric keeps early ones.
static const float FALLING[6] = {9, 4, 3, 2, 1, 9};
static const case_context CONTEXTS[] = {
    {.id = "one",
     .n_tokens = 6,
     .n_questions = 3,
     .questions = {{.n_queries = 5, .head = {0, 1}, .first = FALLING},
                   {.n_queries = 0},
                   {.n_queries = 7, .head = {2, 0}}}},
    {.id = "skipped", .n_tokens = 30, .n_questions = 1, .questions = {{.n_queries = 0}}},
    {.id = "two", .n_tokens = 12, .n_questions = 1, .questions = {{.n_queries = 6, .head = {0, 1}}}}};
static pair_set pairs;
static kvb_error found;

static void setup(void)
{
    help_setup();
    case_select(&from, case_record("run.h5", CONTEXTS, 3));
    study_options o = case_options("mean_loss");
    help_ok(pairs_open(&pairs, &from, "keydiff", &o, err));
}

static void teardown(void)
{
    pairs_close(&pairs);
    case_teardown();
}

static pair_walk begin(study_progress *p, double min_keep)
{
    static study_options o;
    o = case_options("mean_loss");
    return pair_walk_open(&pairs, study_solve_options(&o), min_keep, p);
}

UNIT_TEST(pairs_are_counted)
{
    unit_numbers(pairs.n_pairs, 3, pairs.n_contexts, 2, pairs.n_skipped, 2, pairs.fewest_queries, 5, pairs.most_queries,
                 7);
    ck_assert_uint_eq(pairs.longest.n_tokens, 12); // of the contexts in use
    ck_assert_uint_eq(pairs.longest.sink, 1);
}

UNIT_TEST(protection_comes_from_the_options_before_the_record)
{
    pair_set other;
    study_options o = case_options("mean_loss");
    o.sink = 3;
    help_ok(pairs_open(&other, &from, "keydiff", &o, err));
    unit_numbers(other.about.sink, 3, other.about.window, 1);
    pairs_close(&other);
    o.window = 3; // nothing is left of context one's six
    help_fails(pairs_open(&other, &from, "keydiff", &o, err), KVB_ARGUMENT,
               "context one: keydiff protects 3 + 3 of its 6");
    pairs_close(&other);
}

UNIT_TEST(nothing_to_solve)
{
    pair_set other;
    selection skipped;
    const selection_request wanted = {CASE_METRIC, 1, "skipped", UINT64_MAX, NULL};
    study_options o = case_options("mean_loss");
    help_ok(selection_open(&skipped, from.path, &wanted, err));
    help_fails(pairs_open(&other, &skipped, "keydiff", &o, err), KVB_ARGUMENT, "nothing to solve");
    pairs_close(&other);
    selection_close(&skipped);
}

UNIT_TEST(every_pair_with_its_curves)
{
    pair_walk w = begin(NULL, 0.4);
    const double loss[5] = {10, 6, 3, 1, 0}; // of FALLING's middle, best first
    ck_assert(pair_walk_next(&w, &found));
    ck_assert(w.context == 0 && w.question == 0 && w.pair == 0);
    for (uint32_t c = 0; c < 5; c++) ck_near(loss_at(&w.problem.curves, 0, 2 + c), loss[c]);
    ck_near(w.problem.curves.total, 14);
    ck_assert_uint_eq(w.problem.curves.floor, 3); // 0.4 of 6, rounded up
    ck_assert_float_eq(w.oracle[1], 4);
    ck_assert_float_eq(w.scores[5], -5);
    ck_assert(pair_walk_next(&w, &found));
    ck_assert(w.context == 0 && w.question == 2 && w.pair == 1);
    ck_near(w.problem.curves.total, 8);
    ck_assert(pair_walk_next(&w, &found));
    ck_assert(w.context == 2 && w.question == 0 && w.pair == 2);
    ck_assert_uint_eq(w.problem.curves.shape.n_tokens, 12);
    ck_assert(!pair_walk_next(&w, &found));
    ck_assert_int_eq(pair_walk_close(&w), KVB_OK);
}

UNIT_TEST(what_fails_on_a_pair_names_it)
{
    pair_walk w = begin(NULL, 0);
    ck_assert(pair_walk_next(&w, &found) && pair_walk_next(&w, &found));
    w.status = kvb_fail(&found, KVB_NUMERIC, "it broke");
    ck_assert(!pair_walk_next(&w, &found));
    ck_assert_int_eq(pair_walk_close(&w), KVB_NUMERIC);
    ck_assert_ptr_nonnull(strstr(found.message, "run.h5: context one, question 2: it broke"));
}

static bool stop_at_two(void *to, double done, double total)
{
    *(double *)to = done;
    return done < 2 && total > 0;
}

UNIT_TEST(whoever_is_told_may_stop_it)
{
    double seen = 0;
    study_progress p = {.update = stop_at_two, .to = &seen};
    study_progress_begin(&p, 3);
    pair_walk w = begin(&p, 0);
    ck_assert(pair_walk_next(&w, &found));
    ck_assert_double_eq(seen, 0); // nothing is done yet
    ck_assert(pair_walk_next(&w, &found));
    ck_assert_double_eq(seen, 1);
    ck_assert(!pair_walk_next(&w, &found));
    ck_assert_int_eq(pair_walk_close(&w), KVB_INTERRUPTED);
    ck_assert_ptr_nonnull(strstr(found.message, "stopped"));
}

static void gather_all(gathered *g, aggregation how, double shrink)
{
    pair_walk w = begin(NULL, 0);
    gather_init(g, &pairs, how);
    while (pair_walk_next(&w, &found)) w.status = gather_add(g, w.context, &w.problem.curves, &found);
    ck_assert_int_eq(pair_walk_close(&w), KVB_OK);
    gather_finish(g, shrink);
}

UNIT_TEST(the_average_of_all_pairs)
{
    gathered g;
    gather_all(&g, AGGREGATE_MEAN_LOSS, 0);
    const loss_curves *c = &g.all.curves;
    // Shares of what each pair can lose: head 0 has 10/14, all, and nothing; head 1 the rest.
    ck_near(c->total, 1);
    ck_near(loss_at(c, 0, 2), (10.0 / 14 + 1 + 0) / 3);
    ck_near(loss_at(c, 1, 2), (4.0 / 14 + 0 + 1) / 3);
    gather_free(&g);
    gather_all(&g, AGGREGATE_MEAN_LOSS, 1); // pulled together until all heads are alike
    ck_near(loss_at(&g.all.curves, 0, 2), 0.5);
    gather_free(&g);
}

UNIT_TEST(one_average_for_each_text_that_has_pairs)
{
    gathered g;
    gather_all(&g, AGGREGATE_TAIL, 0);
    ck_assert_uint_eq(g.n_texts, 2); // without the skipped one
    ck_assert_uint_eq(g.texts[0].count, 2);
    ck_near(loss_at(&g.texts[0].curves, 0, 0), (10.0 / 14 + 1) / 2);
    ck_near(loss_at(&g.texts[1].curves, 1, 0), 1);
    gather_free(&g);
    gather_all(&g, AGGREGATE_MEAN_RATIO, 0);
    ck_assert_uint_eq(g.n_texts, 0);
    gather_free(&g);
}

UNIT_TEST(a_table_is_judged_as_the_runtime_rounds_it)
{
    double sum[2] = {0.5, 0};
    // Head 0 keeps 4 of 6 and loses its two last middle tokens, 2 + 1 of 14; head 1 keeps all. Then the other way.
    const double prune[] = {2.0 / 6, 0, 0, 2.0 / 6};
    pair_walk w = begin(NULL, 0);
    ck_assert(pair_walk_next(&w, &found));
    help_ok(judge_table(sum, &w.problem.curves, NULL, 2, prune, err));
    ck_near(sum[0], 0.5 + 3.0 / 14);
    ck_near(sum[1], 2.0 / 14);
    pair_walk_close(&w);
}

UNIT_MAIN_EACH("study pairs", setup, teardown)
