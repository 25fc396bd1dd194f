// What the search for better budgets measures with: texts dealt into sets, candidates that lose what their cuts lose
// and are measured once, a start that spends only as many texts as the evaluations pay for, and stops.
#include "evaluator/refine_bench.h"
#include "formats/table_write.h"
#include "test_profiler_cases.h"

enum { L = 2, G = 2, HEADS = L * G, VOCABULARY = 300, T = 60, N = 8, TEXTS = 6, LINES = 9, KNOTS = 2 };
static const double RATIO_OF[KNOTS] = {0.4, 0.8};

typedef struct bench_case {
    model *m;
    metric by;
    sweep_text texts[TEXTS];
    int32_t ids[TEXTS][T + N];
    kvb_table *table;
    refine_table refined;
    refine_bench b;
} bench_case;

// Writes a table with evenly spaced ratios; heads of the second layer keep more.
static void write_table(const char *path, const char *sha256)
{
    double ratio[LINES], prune[LINES * HEADS], zeros[LINES * HEADS] = {0};
    uint8_t saturated[LINES] = {0};
    for (int r = 0; r < LINES; r++) {
        ratio[r] = (r + 1) / 10.0;
        for (int h = 0; h < HEADS; h++) prune[r * HEADS + h] = ratio[r] + (h < G ? 0.05 : -0.05) * (r < LINES - 1);
    }
    cJSON *metadata = help_table_metadata("{\"shrink\":\"0.1\",\"min_keep\":\"0\",\"n_rows\":\"9\"}");
    cJSON_ReplaceItemInObject(metadata, "model_sha256", cJSON_CreateString(sha256));
    const table_content content = {LINES, L,     G,     prune,     ratio, zeros, zeros,   zeros,
                                   zeros, zeros, ratio, saturated, NULL,  NULL,  metadata};
    help_ok(table_write(path, &content, err));
    cJSON_Delete(metadata);
}

// Opens the tiny model, a table, and six texts of random ids.
static void open_case(bench_case *c)
{
    const char *path = help_path("table.safetensors");
    *c = (bench_case){.m = case_open(help_path("tiny.gguf"), backend_find("cpu"))};
    help_ok(metric_parse(&c->by, "keydiff", err));
    write_table(path, c->m->sha256);
    help_ok(kvb_table_open(&c->table, path, NULL, err));
    help_ok(refine_table_open(&c->refined, c->table, path, err));
    for (int t = 0; t < TEXTS; t++) {
        sweep_text *x = &c->texts[t];
        for (int i = 0; i < T + N; i++) c->ids[t][i] = (int32_t)((case_uniform() + 1) * 0.5 * VOCABULARY);
        *x = (sweep_text){.ids = c->ids[t], .n_ids = T + N};
        snprintf(x->name, sizeof x->name, "text %d", t);
        memset(x->sha256, 'a' + t, 64);
    }
    c->b = (refine_bench){.m = c->m,
                          .table = &c->refined,
                          .knots = RATIO_OF,
                          .n_knots = KNOTS,
                          .texts = c->texts,
                          .n_texts = TEXTS,
                          .plan = {.n_tokens = T, .n_next = N, .batch = 3, .by = &c->by, .sink = 4, .window = 1}};
}

static void close_case(bench_case *c)
{
    ck_assert(refine_bench_free(&c->b, KVB_OK, NULL) == KVB_OK);
    refine_table_free(&c->refined);
    kvb_table_close(c->table);
    model_free(c->m);
}

UNIT_TEST(texts_are_dealt_in_turn)
{
    bench_case c;
    open_case(&c);
    help_ok(refine_bench_deal(&c.b, NULL, err));
    const uint32_t want[SET_COUNT][3] = {{0, 4}, {2}, {1, 3, 5}}, n[SET_COUNT] = {2, 1, 3};
    for (int s = 0; s < SET_COUNT; s++) {
        ck_assert_uint_eq(c.b.n_members[s], n[s]);
        for (uint32_t i = 0; i < n[s]; i++) ck_assert_uint_eq(c.b.members[s][i], want[s][i]);
    }
    ck_assert_uint_eq(refine_bench_bytes(&c.b), 5 * damage_text_bytes(c.m, &c.b.plan));
    close_case(&c);
    open_case(&c);
    const refine_set none[TEXTS] = {0}; // all in one set
    help_fails(refine_bench_deal(&c.b, none, err), KVB_ARGUMENT, "expected some of both");
    close_case(&c);
}

// A candidate loses what its table's budgets lose; nothing is measured twice, and a log keeps the results.
UNIT_TEST(candidates_lose_what_their_cuts_lose)
{
    bench_case c;
    double shift[2 * KNOTS * HEADS] = {0}, loss[2 * KNOTS * 2], again[2 * KNOTS * 2], *kl;
    for (int k = 0; k < KNOTS; k++) shift[(KNOTS + k) * HEADS] = -1; // the second candidate: head 0 keeps more
    open_case(&c);
    help_ok(refine_bench_deal(&c.b, NULL, err));
    help_ok(refine_bench_open(&c.b, help_path("bench.cells"), err));
    for (int i = 0; i < 2; i++)
        help_ok(refine_bench_losses(&c.b, false, shift + i * KNOTS * HEADS, loss + i * KNOTS * 2, err));
    ck_assert(c.b.n_measured == 2 * KNOTS * 2 && c.b.n_prefills == 2);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < KNOTS; k++) {
            kvb_table *t;
            uint32_t keep[HEADS];
            damage_value want;
            help_ok(refine_table_apply(&c.refined, RATIO_OF, KNOTS, shift + i * KNOTS * HEADS, &t, err));
            help_ok(kvb_budgets(t, RATIO_OF[k], T, NULL, keep, HEADS, err));
            help_ok(damage_measure(c.b.d, &c.b.open[c.b.members[SET_CALIBRATION][1]], keep, NULL, 1, &want, err));
            ck_assert(fabs(loss[(i * KNOTS + k) * 2 + 1] - want.kl) < 1e-12 && want.kl > 0);
            kvb_table_close(t);
        }
    for (int i = 0; i < 2; i++)
        help_ok(refine_bench_losses(&c.b, false, shift + i * KNOTS * HEADS, again + i * KNOTS * 2, err));
    ck_assert(memcmp(loss, again, sizeof loss) == 0 && c.b.n_measured == 2 * KNOTS * 2);
    help_ok(refine_bench_judge(&c.b, SET_TEST, shift + KNOTS * HEADS, &kl, err));
    for (int i = 0; i < 2 * KNOTS; i++) { // the means come first, then each text
        const double *each = kl + 2 * KNOTS + i * 3;
        ck_assert(fabs(kl[i] - (each[0] + each[1] + each[2]) / 3) < 1e-12 && kl[i] > 0);
    }
    free(kl);
    close_case(&c);
}

static bool never(void *context, double done, double total)
{
    (void)context, (void)done, (void)total;
    return false;
}

UNIT_TEST(a_start_costs_what_is_paid)
{
    bench_case c;
    uint32_t n;
    refine_task t = {
        .n_layers = L, .n_heads = HEADS, .n_knots = KNOTS, .n_texts = 2, .heads = true, .evaluations = 100};
    open_case(&c);
    help_ok(refine_bench_deal(&c.b, NULL, err));
    help_ok(refine_bench_open(&c.b, NULL, err));
    // A text costs three evaluations: 6 budgets, 4 heads, half a continuation each, divided by 2 ratios and 2 texts.
    double start[KNOTS * HEADS];
    help_ok(refine_bench_start(&c.b, &t, start, &n, err));
    ck_assert_uint_eq(n, 2);
    ck_assert(fabs(t.start_cost - 6) < 1e-12 && c.b.n_alone == 2 * 6 * HEADS);
    t.evaluations = 5; // three quarters of these pay for one text
    help_ok(refine_bench_start(&c.b, &t, start, &n, err));
    ck_assert(n == 1 && fabs(t.start_cost - 9) < 1e-12 && c.b.n_alone == 2 * 6 * HEADS); // known: no new cuts
    t.evaluations = 2;
    help_ok(refine_bench_start(&c.b, &t, start, &n, err));
    ck_assert(n == 0 && fabs(t.start_cost - 9) < 1e-12);
    const forward_progress stop = {never, NULL};
    double shift[KNOTS * HEADS] = {0}, loss[KNOTS * TEXTS];
    c.b.stop = &stop;
    ck_assert(refine_bench_losses(&c.b, true, shift, loss, NULL) == KVB_INTERRUPTED);
    close_case(&c);
}

UNIT_MAIN_ONCE("evaluator/refine_bench", case_tiny_setup, help_teardown)
