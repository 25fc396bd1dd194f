// A job that adds to a finished record: what is left to do, and that the larger record has the bytes of one run.
#include "profiler/profile.h"
#include "test_profiler_cases.h"

#define IDS_A "9,8,7,6,5,44,33,22,11,250,260,270,280,290,13,14,15,16,17,18,19"
#define IDS_B "19,18,17,16,15,14,13,290,280,270,260,250,11,22,33"
#define LINE(name, ids, questions) \
    "{\"sample_id\": \"" name "\", \"context_ids\": [" ids "], \"question_ids\": [" questions "]}\n"
static const char one_question[] = LINE("a", IDS_A, "[100,101,102]"),
                  two_questions[] = LINE("a", IDS_A, "[100,101,102],[103]"),
                  second[] = LINE("b", IDS_B, "[104],[105,106]"), other_text[] = LINE("a", IDS_B, "[100,101,102]"),
                  other_question[] = LINE("a", IDS_A, "[100,101],[103]"),
                  all[] = LINE("a", IDS_A, "[100,101,102],[103]") LINE("b", IDS_B, "[104],[105,106]");

static model *m;
static model_text words;
static metric metrics[3];

static void setup(void)
{
    help_setup();
    case_tiny_model(help_path("tiny.gguf"), NULL);
    m = case_open(help_path("tiny.gguf"), &backend_cpu);
    words = case_text(m);
    help_ok(metric_parse(&metrics[0], "keydiff", err));
    help_ok(metric_parse(&metrics[1], "snapkv:window=8", err));
    help_ok(metric_parse(&metrics[2], "random", err));
}

static void teardown(void)
{
    model_text_close(&words);
    model_free(m);
    help_teardown();
}

// A job of some lines, or of none (NULL), that adds to `base`, if any.
typedef struct grown {
    calib_file file;
    profile_options o;
    profile_job job;
    kvb_status status;
    kvb_error problem;
} grown;

static grown prepare(const char *lines, size_t n_metrics, record *base)
{
    grown g = {.o = {.metrics = metrics,
                     .n_metrics = n_metrics,
                     .draw = {.temperature = 0.7, .seed = 1},
                     .new_tokens = 6,
                     .ignore_eos = true,
                     .grows = base}};
    if (lines) help_ok(calib_parse(&g.file, lines, strlen(lines), "calib.jsonl", err));
    g.status = profile_prepare(&g.job, m, &words, &g.file, lines != NULL, &g.o, &g.problem);
    return g;
}

static void close_job(grown *g)
{
    profile_job_free(&g->job);
    calib_free(&g->file);
}

static void run(grown *g, const char *path)
{
    const model_config *c = &m->config;
    cJSON *attributes;
    record_writer *w;
    profile_times times;
    ck_assert_msg(g->status == KVB_OK, "%s", g->problem.message);
    if (g->o.grows) help_ok(profile_grown_attributes(&attributes, m, &g->job, &g->o, err));
    else attributes = profile_attributes(m, &g->job, &g->o);
    help_ok(record_begin(&w, path, &(record_shape){c->n_layers, c->n_heads, c->n_kv_heads, c->head_dim}, attributes,
                         g->o.grows ? RECORD_ADD : RECORD_REPLACE, err));
    profile_share whole;
    help_ok(profile_share_out(&whole, m, &g->job, NULL, 1, 0, err));
    help_ok(profile_run_share(m, &g->job, &g->o, &whole, w, NULL, &times, err));
    profile_share_free(&whole);
    help_ok(profile_finish(&g->job, NULL, w, err));
    record_writer_free(w);
    cJSON_Delete(attributes);
    close_job(g);
}

static void profile(const char *path, const char *lines, size_t n_metrics)
{
    grown g = prepare(lines, n_metrics, NULL);
    run(&g, path);
}

UNIT_TEST(test_only_what_the_record_lacks_is_left)
{
    const char *path = help_path("run.h5");
    record *base;
    profile(path, one_question, 2);
    help_ok(record_open(&base, path, err));
    ck_assert_str_eq(record_path(base), path);

    grown g = prepare(NULL, 3, base); // a metric: the record's text again, and nothing to decode
    unit_numbers(g.status, KVB_OK, g.job.n_contexts, 1, g.job.n_pairs, 0, g.job.growth.recorded, 3);
    ck_assert_uint_eq(g.job.growth.witness, 0); // keydiff reads less than snapkv; random would prove nothing
    unit_numbers(g.job.growth.relation, RECORD_SAME_TEXTS, g.job.growth.check.n_tokens, 0);
    close_job(&g);

    g = prepare(second, 2, base); // a text: only that one, and one of the record's for comparison
    ck_assert_uint_eq(g.job.n_contexts, 1);
    ck_assert_str_eq(g.job.contexts[0].id, "b");
    unit_numbers(g.job.growth.check.n_tokens, 21, g.job.growth.relation, RECORD_NEW_TEXTS, g.job.growth.n_ids, 2);
    close_job(&g);

    g = prepare(two_questions, 2, base); // a question: only the second one
    unit_numbers(g.job.n_pairs, 1, g.job.contexts[0].n_recorded, 1, g.job.growth.relation, RECORD_ALL_TEXTS);
    close_job(&g);

    g = prepare(one_question, 2, base); // nothing
    ck_assert_uint_eq(g.job.n_contexts, 0);
    close_job(&g);
    record_close(base);
}

UNIT_TEST(test_grown_records_have_the_bytes_of_one_run)
{
    const struct {
        const char *before, *added, *whole;
        size_t n_before, n_after;
    } cases[] = {
        {two_questions, NULL, two_questions, 1, 3}, // metrics
        {one_question, two_questions, two_questions, 2, 2},
        {two_questions, all, all, 2, 2},
        {one_question, all, all, 1, 3},
        {second, all, all, 3, 3}, // the order is that of the files
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *path = help_path("run.h5"), *want = help_path("want.h5");
        record *base;
        profile(path, cases[i].before, cases[i].n_before);
        profile(want, cases[i].whole, cases[i].n_after);
        help_ok(record_open(&base, path, err));
        grown g = prepare(cases[i].added, cases[i].n_after, base);
        run(&g, path);
        record_close(base);
        help_same_file(path, want);
    }
}

UNIT_TEST(test_what_is_not_the_records_is_refused)
{
    const char *path = help_path("run.h5");
    record *base;
    profile(path, one_question, 2);
    help_ok(record_open(&base, path, err));
    const struct {
        const char *lines;
        size_t n_metrics;
        kvb_status status;
        const char *why;
    } cases[] = {
        {other_text, 2, KVB_MISMATCH, "run.h5: has another text for sample a"},
        {other_question, 2, KVB_MISMATCH, "run.h5: sample a: question 1 is another one there"},
        {second, 1, KVB_ARGUMENT, "run.h5: has metric snapkv:kvpress:window=8, so a text that is added"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        grown g = prepare(cases[i].lines, cases[i].n_metrics, base);
        ck_assert_int_eq(g.status, cases[i].status);
        ck_assert_msg(strstr(g.problem.message, cases[i].why), "%s", g.problem.message);
        close_job(&g);
    }
    grown g = prepare(one_question, 2, base);
    g.o.draw.seed = 2;
    cJSON *attributes;
    help_fails(profile_grown_attributes(&attributes, m, &g.job, &g.o, err), KVB_MISMATCH,
               "run.h5 and this command cannot be joined: seed");
    close_job(&g);
    record_close(base);
}

UNIT_MAIN_EACH("profiler growth", setup, teardown)
