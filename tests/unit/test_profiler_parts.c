// What other folders ask of metrics, passes, plans and devices, compared with plain sums.
#include "profiler/profile.h"
#include "test_profiler_views.h"

// ---- What is asked of metrics ----

UNIT_TEST(test_metrics_answer)
{
    metric m;
    help_ok(metric_parse(&m, "snapkv:kvpress:window=20", err));
    unit_numbers(metric_window(&m), 20, metric_least_tokens(&m), 21);
    help_ok(metric_check_tokens(&m, 21, err));
    help_fails(metric_check_tokens(&m, 20, err), KVB_ARGUMENT, "has 20 tokens, expected at least 21");
    help_ok(metric_parse(&m, "critical+snapkv:kvpress:window=30", err)); // the wrapped metric's
    unit_numbers(metric_window(&m), 30, metric_least_tokens(&m), 31);
    help_ok(metric_parse(&m, "knorm", err));
    unit_numbers(metric_window(&m), 0, metric_least_tokens(&m), 1);
}

// What a record says of a metric goes before what its scorer says; unknown names have no press.
UNIT_TEST(test_presses)
{
    cJSON *said = cJSON_Parse("{\"kvpress\":{\"press\":\"Another\"}}");
    const struct {
        const char *name, *press;
        const cJSON *parameters;
    } cases[] = {{"knorm", "KnormPress", NULL}, {"knorm", "Another", said}, {"nobody", NULL, NULL}};
    for (int i = 0; i < 3; i++) {
        cJSON *press = metric_press_of(cases[i].name, cases[i].parameters);
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(press, "press"));
        ck_assert_ptr_nonnull(press);
        if (cases[i].press) ck_assert_str_eq(name, cases[i].press);
        else ck_assert_ptr_null(name);
        cJSON_Delete(press);
    }
    cJSON_Delete(said);
}

typedef struct words {
    bool on;
    uint32_t count;
    double share;
    uint32_t how;
} words;

UNIT_TEST(test_values_of_specs)
{
    const spec_row row = {"try",
                          NULL,
                          {SPEC_ON_OFF(words, on, 1, "a switch"), SPEC(words, count, 7, 0, 99, "a count"),
                           SPEC(words, share, 0.1, 0, 1, "a share"), SPEC_CHOICE(words, how, 1, 1, "mean|raw", "how")},
                          NULL};
    static const char *const texts[] = {"1", "7", "0.1", "raw"};
    const double values[] = {1, 7, 0.1, 1};
    words w = {0};
    char text[32];
    spec_set_defaults(&row, &w);
    for (int i = 0; i < 4; i++) {
        ck_assert(spec_value(&row.parameters[i], &w) == values[i]);
        ck_assert_uint_eq(spec_value_text(text, sizeof text, &row.parameters[i], &w), strlen(texts[i]));
        ck_assert_str_eq(text, texts[i]);
    }
    const double numbers[] = {0.1, 1.0 / 3, 1e22, 5e-324, 123456789, 0.1 + 0.2};
    for (int i = 0; i < 6; i++) {
        ck_assert_uint_eq(spec_number(text, sizeof text, numbers[i]), strlen(text));
        ck_assert_msg(strtod(text, NULL) == numbers[i], "%s", text);
    }
    ck_assert_uint_eq(spec_number(text, sizeof text, 0.1), 3); // no more digits than it takes
}

// ---- Passes ----

static size_t taken; // floats that the counting device gave

static dev count_alloc(backend_device *on, size_t n_floats)
{
    taken += n_floats;
    return backend_ref.alloc(on, n_floats);
}

// A pass takes the memory that it says, within bounds: linear in the context, keys and values included. The device's
// scratch memory is extra.
UNIT_TEST(test_memory_of_a_pass)
{
    backend counting = backend_ref;
    counting.alloc = count_alloc;
    case_tiny_model(help_path("tiny.gguf"), NULL);
    model *m = case_open(help_path("tiny.gguf"), &counting);
    uint64_t bytes[3];
    for (uint32_t i = 0; i < 3; i++) {
        const forward_plan plan = {100 << i, 2, 5, true, false, 1};
        forward *f;
        taken = 0;
        help_ok(forward_open(&f, m, &plan, err));
        bytes[i] = forward_bytes(m, &plan);
        ck_assert_msg(bytes[i] <= taken * sizeof(float) && (double)taken * sizeof(float) < 1.2 * (double)bytes[i] + 4e6,
                      "%llu planned, %zu taken", (unsigned long long)bytes[i], taken * sizeof(float));
        ck_assert_uint_lt(forward_cache_bytes(m, &plan), bytes[i]);
        ck_assert_uint_ge(forward_cache_bytes(m, &plan), 2ull * 2 * 2 * 16 * plan.max_tokens * sizeof(float));
        forward_close(f);
    }
    ck_assert_uint_le(bytes[2] - bytes[1], 2 * (bytes[1] - bytes[0]) + 4096);
    const forward_plan small = {100, 2, 5, true, false, 1}, large = {4000, 2, 5, true, false, 1};
    model *on_cpu = case_open(help_path("tiny.gguf"), backend_find("cpu"));
    ck_assert_uint_gt(forward_scratch_bytes(on_cpu, &large), forward_scratch_bytes(on_cpu, &small));
    model_free(on_cpu);
    model_free(m);
}

// A token that is drawn on the device is the one that the sampler draws from the same logits.
UNIT_TEST(test_draws)
{
    enum { N = 20, VOCABULARY = 300 };
    case_tiny_model(help_path("tiny.gguf"), NULL);
    model *m = case_open(help_path("tiny.gguf"), backend_find("cpu"));
    const forward_plan plan = {N, 2, 4, false, false, 1};
    const decode_row rows[2] = {{0, 0, false}, {1, 0, false}};
    const uint32_t both[2] = {0, 1};
    const draw_key keys[2] = {{.context = 1, .question = 0, .step = 0}, {.context = 1, .question = 1, .step = 0}};
    int32_t ids[N], next[2] = {5, 9}, drawn[2];
    for (int i = 0; i < N; i++) ids[i] = i * 7 % VOCABULARY;
    float *logits = case_alloc((size_t)2 * VOCABULARY, sizeof *logits);
    for (int greedy = 0; greedy < 2; greedy++) {
        const sampler s = {greedy, 1.5, 3};
        forward *f;
        help_ok(forward_open(&f, m, &plan, err));
        help_ok(forward_prefill(f, ids, N, NULL, NULL, NULL, err));
        forward_begin_questions(f, NULL, 2);
        help_ok(forward_rows(f, rows, next, 2, both, 2, logits, err));
        forward_begin_questions(f, NULL, 2);
        help_ok(forward_draw(f, rows, next, 2, both, 2, &s, keys, drawn, err));
        for (int i = 0; i < 2; i++)
            ck_assert_int_eq(drawn[i], sampler_draw(&s, logits + (size_t)i * VOCABULARY, VOCABULARY, &keys[i]));
        forward_close(f);
    }
    free(logits);
    model_free(m);
}

// ---- Failures of a device, and plans ----

// The first failure counts, whatever follows.
UNIT_TEST(test_first_failure_stays)
{
    backend_device *on;
    help_ok(backend_ref.open(&on, &backend_ref, NULL, err));
    help_ok(backend_ref.check(on, err));
    backend_fail(on, KVB_MEMORY, "the %dst", 1);
    backend_fail(on, KVB_IO, "the %dnd", 2);
    help_fails(backend_ref.check(on, err), KVB_MEMORY, "the 1st");
    help_fails(backend_ref.check(on, err), KVB_MEMORY, "the 1st");
    backend_ref.close(on);
}

// ---- What is asked of models ----

// Layers with a window are not budgeted: the others are numbered without gaps, and kept shares are shares of theirs.
UNIT_TEST(test_bounded_layers)
{
    model m = {.config = {.n_layers = 5, .n_heads = 4, .n_kv_heads = 2, .head_dim = 16, .window = 8, .score_cap = 50}};
    layer_set_add(&m.config.bounded, 1);
    layer_set_add(&m.config.bounded, 3);
    const uint32_t place[6] = {0, 1, 1, 2, 2, 3};
    for (uint32_t l = 0; l <= 5; l++) ck_assert_uint_eq(model_budgeted(&m.config, l), place[l]);
    for (uint32_t l = 0; l < 5; l++) {
        attention_shape s = model_attention(&m, l);
        ck_assert(s.n_heads == 4 && s.n_kv_heads == 2 && s.head_dim == 16 && s.softcap == 50);
        ck_assert_uint_eq(s.window, l % 2 ? 8 : 0);
    }
    const uint32_t n = 100, whole = 2 * 2 * n, kept = 3 * 2 * n * 3 / 10; // two bounded layers; 30 % of the other three
    ck_assert_double_eq_tol(model_kept_share(&m.config, whole + kept, n), 0.3, 1e-12);
    ck_assert_double_eq_tol(model_kept_share(&m.config, 5 * 2 * n, n), 1, 1e-12);
}

UNIT_MAIN_EACH("profiler: parts", help_setup, help_teardown)
