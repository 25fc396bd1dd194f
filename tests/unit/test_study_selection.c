// Which contexts, questions and metrics of a record are taken, and what the record says of a metric.
#include "study/record_metric.h"
#include "study_help.h"

static const char *const METRICS[] = {"ea:kvpress", "keydiff", "snapkv:kvpress", "snapkv:lukv"};
static const case_context CONTEXTS[] = {
    {.id = "one",
     .n_tokens = 12,
     .n_questions = 3,
     .questions = {{.n_queries = 5}, {.n_queries = 0}, {.n_queries = 7}}},
    {.id = "two", .n_tokens = 20, .n_questions = 1, .questions = {{.n_queries = 5}}}};
static const char *path;

static void setup(void)
{
    help_setup();
    path = help_path("run.h5");
    case_write(path,
               case_attributes("{\"keydiff\": {\"protect_sink\": 2, \"protect_window\": 3, \"x\": 1.5},"
                               " \"snapkv:lukv\": {\"window\": 40}, \"ea:kvpress\": 7}"),
               CONTEXTS, 2, METRICS, 4);
}

static kvb_status take(selection *s, const char *contexts, const char *const *names, size_t n, kvb_error *err)
{
    const selection_request wanted = {names, n, contexts, UINT64_MAX, NULL};
    return selection_open(s, path, &wanted, err);
}

UNIT_TEST(metrics_by_name_by_beginning_and_all)
{
    selection s;
    const char *const some[] = {"keydiff", "ea", "keydiff"};
    help_ok(take(&s, NULL, some, 3, err));
    ck_assert_uint_eq(s.n_metrics, 2);
    unit_strings(s.metrics[0], "keydiff", s.metrics[1], "ea:kvpress");
    selection_close(&s);
    const char *const all[] = {"snapkv:lukv", "all"};
    help_ok(take(&s, NULL, all, 2, err));
    ck_assert_uint_eq(s.n_metrics, 4);
    ck_assert_str_eq(s.metrics[0], "snapkv:lukv");
    selection_close(&s);
    const char *const wrong[][1] = {{"snapkv"}, {"key"}, {"keydiff:raw"}};
    const char *const says[] = {"several metrics begin like this", "not in the record", "not in the record"};
    for (int i = 0; i < 3; i++) {
        help_fails(take(&s, NULL, wrong[i], 1, err), KVB_ARGUMENT, says[i]);
        selection_close(&s);
    }
}

UNIT_TEST(contexts_in_the_given_order_once)
{
    selection s;
    help_ok(take(&s, "two,one", CASE_METRIC, 1, err));
    ck_assert_uint_eq(s.n_contexts, 2);
    ck_assert_str_eq(selection_context(&s, 0)->id, "two");
    ck_assert_uint_eq(s.contexts[1], 0);
    selection_close(&s);
    help_fails(take(&s, "one,one", CASE_METRIC, 1, err), KVB_ARGUMENT, "'one' is given twice");
    selection_close(&s);
    help_fails(take(&s, "one,thre", CASE_METRIC, 1, err), KVB_ARGUMENT, "has no context 'thre'");
    selection_close(&s);
    help_fails(take(&s, "one,", CASE_METRIC, 1, err), KVB_ARGUMENT, "has no context ''");
    selection_close(&s);
}

UNIT_TEST(questions_without_queries_and_later_ones_are_left_out)
{
    selection s;
    const selection_request two = {CASE_METRIC, 1, NULL, 2, NULL};
    case_select(&s, path);
    unit_numbers(selection_count(&s, 0), 2, selection_count(&s, 1), 1);
    selection_close(&s);
    help_ok(selection_open(&s, path, &two, err));
    ck_assert_uint_eq(selection_count(&s, 0), 1);
    ck_assert(!selection_has(&s, &selection_context(&s, 0)->questions[2], 2));
    selection_close(&s);
}

UNIT_TEST(another_model_is_refused)
{
    selection s;
    case_select(&s, path);
    unit_strings(record_text(s.r, "model_id"), "by hand", record_text(s.r, "nothing"), "");
    help_ok(selection_require_model(&s, CASE_MODEL("ab12"), "t", err));
    help_ok(selection_require_model(&s, "", "t", err));
    help_fails(selection_require_model(&s, CASE_MODEL("ab13"), "t.safetensors", err), KVB_MISMATCH,
               "t.safetensors are of different");
    selection_close(&s);
}

UNIT_TEST(what_the_record_says_of_a_metric)
{
    selection s;
    record_metric m;
    const struct {
        const char *metric;
        uint32_t sink, window;
        const char *parameters;
    } cases[] = {{"keydiff", 2, 3, "{\"protect_sink\":2,\"protect_window\":3,\"x\":1.5}"},
                 {"snapkv:lukv", 4, 40, "{\"window\":40}"},
                 {"snapkv:kvpress", 4, 32, "{}"},
                 {"ea:kvpress", 4, 1, "{}"}};
    case_select(&s, path);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        help_ok(record_metric_read(&m, s.r, cases[i].metric, err));
        unit_numbers(m.sink, cases[i].sink, m.window, cases[i].window);
        ck_assert_str_eq(m.parameters, cases[i].parameters);
        record_metric_free(&m);
    }
    selection_close(&s);
    // A value that is not a count is refused.
    static const char *const own[] = {"{\"keydiff\": {\"protect_window\": 6}}", "{\"keydiff\": {\"protect_sink\": -1}}",
                                      "{\"keydiff\": {\"protect_window\": 1.5}}"};
    for (int i = 0; i < 3; i++) {
        cJSON *a = case_attributes(CASE_PROTECTED);
        cJSON_ReplaceItemInObject(a, "metrics", cJSON_CreateString(own[i]));
        path = help_path("own%d.h5", i);
        case_write(path, a, CONTEXTS, 2, CASE_METRIC, 1);
        case_select(&s, path);
        if (i == 0) {
            help_ok(record_metric_read(&m, s.r, "keydiff", err));
            ck_assert(m.sink == 4 && m.window == 6);
            record_metric_free(&m);
        } else help_fails(record_metric_read(&m, s.r, "keydiff", err), KVB_FORMAT, "expected a whole number");
        selection_close(&s);
    }
}

// The record states a metric's kin, even for metrics that this program does not know. If it does not, as in old
// records, the name gives it.
UNIT_TEST(kin_of_a_metric)
{
    static const struct {
        const char *about, *metric, *kin;
        uint32_t window;
    } cases[] = {{"{\"cost\": 2, \"kin\": \"unheard\", \"protect_window\": 3}", "new:form", "unheard", 3},
                 {"{\"cost\": 0, \"kin\": \"snapkv\", \"window\": 5}", "mine", "snapkv", 5},
                 {"{\"window\": 7}", "snapkv:lukv+critical", "snapkv", 7},
                 {"{\"window\": 7}", "ea:kvpress", "ea", 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char metrics[200];
        record_metric m;
        selection s;
        snprintf(metrics, sizeof metrics, "{\"%s\": %s}", cases[i].metric, cases[i].about);
        path = help_path("kin%zu.h5", i);
        case_write(path, case_attributes(metrics), CONTEXTS, 2, CASE_METRIC, 1);
        case_select(&s, path);
        help_ok(record_metric_read(&m, s.r, cases[i].metric, err));
        ck_assert_str_eq(m.kin, cases[i].kin);
        ck_assert_msg(m.window == cases[i].window, "%s: window %u", cases[i].metric, m.window);
        record_metric_free(&m);
        selection_close(&s);
    }
}

UNIT_MAIN_EACH("study selection", setup, help_teardown)
