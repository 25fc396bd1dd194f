// Walking the pairs of a record: which ones, in which order, with which curves; stopping; and the averages that are
// made of them.
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
static selection from;
static pair_set pairs;

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
    selection_close(&from);
    help_teardown();
}

static void begin(pair_walk *w, study_progress *p, double min_keep)
{
    static study_options o;
    o = case_options("mean_loss");
    solve_options solve = study_solve_options(&o);
    pair_walk_open(w, &pairs, &solve, min_keep, p);
}

UNIT_TEST(pairs_are_counted)
{
    ck_assert_uint_eq(pairs.n_pairs, 3);
    ck_assert_uint_eq(pairs.n_contexts, 2);
    ck_assert_uint_eq(pairs.n_skipped, 2);
    ck_assert_uint_eq(pairs.fewest_queries, 5);
    ck_assert_uint_eq(pairs.most_queries, 7);
    ck_assert_uint_eq(pairs.longest.n_tokens, 12); // of those in use
    ck_assert_uint_eq(pairs.longest.sink, 1);
}

UNIT_TEST(protection_comes_from_the_options_before_the_record)
{
    pair_set other;
    study_options o = case_options("mean_loss");
    o.sink = 3;
    help_ok(pairs_open(&other, &from, "keydiff", &o, err));
    ck_assert_uint_eq(other.about.sink, 3);
    ck_assert_uint_eq(other.about.window, 1);
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
    pair_walk w;
    begin(&w, NULL, 0.4);
    const double loss[5] = {10, 6, 3, 1, 0}; // of FALLING's middle, best first
    help_ok(pair_walk_next(&w, err));
    ck_assert(!w.ended && w.context == 0 && w.question == 0 && w.pair == 0);
    for (uint32_t c = 0; c < 5; c++) ck_near(loss_at(&w.problem.curves, 0, 2 + c), loss[c]);
    ck_near(w.problem.curves.total, 14);
    ck_assert_uint_eq(w.problem.curves.floor, 3); // 0.4 of 6, upwards
    ck_assert_float_eq(w.oracle[1], 4);
    ck_assert_float_eq(w.scores[5], -5);
    help_ok(pair_walk_next(&w, err));
    ck_assert(w.context == 0 && w.question == 2 && w.pair == 1);
    ck_near(w.problem.curves.total, 8);
    help_ok(pair_walk_next(&w, err));
    ck_assert(w.context == 2 && w.question == 0 && w.pair == 2);
    ck_assert_uint_eq(w.problem.curves.shape.n_tokens, 12);
    kvb_error inner = {0};
    ck_assert(pair_walk_name(&w, KVB_OK, &inner) == KVB_OK);
    strcpy(inner.message, "it broke");
    ck_assert(pair_walk_name(&w, KVB_NUMERIC, &inner) == KVB_NUMERIC);
    ck_assert_ptr_nonnull(strstr(inner.message, "run.h5: context two, question 0: it broke"));
    help_ok(pair_walk_next(&w, err));
    ck_assert(w.ended);
    pair_walk_close(&w);
}

static void gather_all(gathered *g, aggregation how, double shrink)
{
    pair_walk w;
    begin(&w, NULL, 0);
    gather_init(g, &pairs, how);
    for (;;) {
        help_ok(pair_walk_next(&w, err));
        if (w.ended) break;
        help_ok(gather_add(g, w.context, &w.problem.curves, err));
    }
    pair_walk_close(&w);
    gather_finish(g, shrink);
}

static bool stop_at_two(void *to, double done, double total)
{
    *(double *)to = done;
    return done < 2 && total > 0;
}

UNIT_TEST(whoever_is_told_may_stop_it)
{
    pair_walk w;
    double seen = 0;
    study_progress p = {.update = stop_at_two, .to = &seen};
    study_progress_begin(&p, 3);
    begin(&w, &p, 0);
    help_ok(pair_walk_next(&w, err));
    ck_assert_double_eq(seen, 0); // nothing is done yet
    help_ok(pair_walk_next(&w, err));
    ck_assert_double_eq(seen, 1);
    help_fails(pair_walk_next(&w, err), KVB_INTERRUPTED, "stopped");
    pair_walk_close(&w);
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
    pair_walk w;
    double sum[2] = {0.5, 0};
    // Head 0 keeps 4 of 6 and loses its two last middle tokens, 2 + 1 of 14; head 1 keeps all. Then the other way.
    const double prune[] = {2.0 / 6, 0, 0, 2.0 / 6};
    begin(&w, NULL, 0);
    help_ok(pair_walk_next(&w, err));
    help_ok(judge_table(sum, &w.problem.curves, NULL, 2, prune, err));
    ck_near(sum[0], 0.5 + 3.0 / 14);
    ck_near(sum[1], 2.0 / 14);
    pair_walk_close(&w);
}

UNIT_MAIN_EACH("study pairs", setup, teardown)
