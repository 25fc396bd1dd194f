// What a run compares: names, metrics and columns of methods, and what they select.
#include "evaluator/method.h"
#include "test_profiler_cases.h"

enum { L = 2, H = 4, G = 2, T = 60, HEADS = L * G, KEEP = 20 };

// A metric and a policy, under uniform, AdaKV and the oracle.
typedef struct bed {
    model *m;
    session *s;
    method methods[2];
    allocator uniform, ada, oracle;
    method_column columns[4];
    method_list list;
} bed;

static void bed_open(bed *b)
{
    int32_t ids[T];
    memset(b, 0, sizeof *b);
    b->m = case_open(help_path("tiny.gguf"), backend_find("cpu"));
    help_ok(metric_parse(&b->methods[0].m, "keydiff", err));
    b->methods[0].sink = 4, b->methods[0].window = 2;
    help_ok(policy_parse(&b->methods[1].p, "morphkv:window=8", err));
    help_ok(allocator_parse(&b->uniform, "uniform", err));
    help_ok(allocator_parse(&b->ada, "ada", err));
    help_ok(allocator_parse(&b->oracle, "oracle", err));
    const method_column columns[4] = {{0, &b->uniform}, {0, &b->oracle}, {1, &b->uniform}, {1, &b->ada}};
    memcpy(b->columns, columns, sizeof columns);
    b->list = (method_list){b->methods, 2, b->columns, 4};
    const session_plan plan = {
        .max_tokens = T, .max_new = 4, .max_rows = 4, .metrics = &b->methods[0].m, .n_metrics = 1};
    help_ok(session_open(&b->s, b->m, &plan, err));
    for (int i = 0; i < T; i++) ids[i] = (int32_t)((case_uniform() + 1) * 0.5 * 300);
    help_ok(session_prefill(b->s, ids, T, NULL, NULL, err));
}

static void bed_close(bed *b)
{
    allocator_free(&b->uniform);
    allocator_free(&b->ada);
    allocator_free(&b->oracle);
    session_close(b->s);
    model_free(b->m);
}

UNIT_TEST(names_and_metrics)
{
    bed b;
    bed_open(&b);
    unit_strings(method_name(&b.methods[0]), "keydiff", method_name(&b.methods[1]), "morphkv:window=8");
    size_t n;
    metric *metrics = method_metrics(&n, &b.list);
    ck_assert_uint_eq(n, 1); // a policy is not a metric
    ck_assert_str_eq(metrics[0].spec, "keydiff");
    free(metrics);
    bed_close(&b);
}

static bool keeps(const kept_set *kept, uint32_t head, uint32_t position)
{
    for (size_t i = kept->offsets[head]; i < kept->offsets[head + 1]; i++)
        if (kept->positions[i] == position) return true;
    return false;
}

// Uniform budgets are the same for all heads and pick what session_select picks; sinks and window are kept.
UNIT_TEST(a_metric_selects)
{
    bed b;
    bed_open(&b);
    const double ratio = 1 - (double)KEEP / T;
    const uint32_t each[HEADS] = {KEEP, KEEP, KEEP, KEEP};
    kept_set got, want;
    help_ok(method_select(b.s, &b.list, &b.columns[0], ratio, NULL, &got, err));
    help_ok(session_select(b.s, b.s->now.scores[0], each, 4, 2, &want, err));
    ck_assert_uint_eq(got.offsets[HEADS], HEADS * KEEP);
    ck_assert_mem_eq(got.offsets, want.offsets, (HEADS + 1) * sizeof *got.offsets);
    ck_assert_mem_eq(got.positions, want.positions, HEADS * KEEP * sizeof *got.positions);
    for (uint32_t h = 0; h < HEADS; h++)
        ck_assert(keeps(&got, h, 0) && keeps(&got, h, 3) && keeps(&got, h, T - 2) && keeps(&got, h, T - 1));
    kept_set_free(&got);
    kept_set_free(&want);
    bed_close(&b);
}

// The oracle picks the tokens of the largest importance, wherever they are, and fails without importance.
UNIT_TEST(the_oracle_selects)
{
    bed b;
    bed_open(&b);
    float importance[HEADS * T] = {0};
    for (uint32_t i = 0; i < KEEP; i++) importance[3 * T + 2 * i + 10] = 1; // all in the last head
    kept_set kept;
    b.methods[0].sink = b.methods[0].window = 0;
    help_fails(method_select(b.s, &b.list, &b.columns[1], 0.9, NULL, &kept, err), KVB_ARGUMENT, "importance");
    help_ok(method_select(b.s, &b.list, &b.columns[1], 1 - (double)KEEP / (HEADS * T), importance, &kept, err));
    ck_assert_uint_eq(kept.offsets[HEADS], KEEP);
    ck_assert_uint_eq(kept.offsets[3], 3); // the others keep one token each
    for (uint32_t i = 3; i < KEEP; i++) ck_assert_uint_eq(kept.positions[i], 2 * (i - 3) + 10);
    kept_set_free(&kept);
    bed_close(&b);
}

UNIT_TEST(a_policy_runs)
{
    bed b;
    bed_open(&b);
    policy_run *run = NULL;
    help_ok(method_policy(&run, b.m, &b.list, &b.columns[2], 0.5, T, 4, err));
    ck_assert_ptr_nonnull(run);
    policy_run_close(run);
    help_fails(method_policy(&run, b.m, &b.list, &b.columns[3], 0.5, T, 4, err), KVB_ARGUMENT, "needs scores");
    ck_assert_ptr_null(run);
    bed_close(&b);
}

UNIT_MAIN_EACH("evaluator: methods", case_tiny_setup, help_teardown)
