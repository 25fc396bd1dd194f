// Every metric against golden data of other code (tests/golden/make_scorers.py), and what all metrics promise: the same
// bits for any number of threads, the same scores for views that show less, kept sets for budget-dependent ones, clear
// refusals.
#include "formats/need.h"
#include "profiler/metric/scorer_parts.h"
#include "test_profiler_cases.h"
#include <omp.h>

enum { NAME_SIZE = 128 };

typedef struct golden {
    backend_device *on;
    file_view file;
    const unsigned char *at;
    layer_view view;
    uint32_t cases;
} golden;

static uint32_t take_u32(golden *g)
{
    uint32_t v;
    memcpy(&v, g->at, sizeof v);
    g->at += sizeof v;
    return v;
}

static const float *take_floats(golden *g, size_t n)
{
    ck_assert_uint_eq((uintptr_t)g->at % sizeof(float), 0);
    const float *p = (const float *)(const void *)g->at;
    g->at += n * sizeof *p;
    return p;
}

// Opens the file, and adds to the view what a forward pass would compute, with the reference backend.
static golden golden_open(void)
{
    golden g = {0};
    help_ok(file_map(&g.file, "tests/golden/scorers.bin", err));
    ck_assert_int_eq(memcmp(g.file.data, "KVBSCO01", 8), 0);
    g.at = g.file.data + 8;
    uint32_t T = take_u32(&g), H = take_u32(&g), G = take_u32(&g), d = take_u32(&g), width = take_u32(&g);
    g.cases = take_u32(&g);
    const float *q_raw = take_floats(&g, (size_t)T * H * d), *q = take_floats(&g, (size_t)T * H * d);
    const float *k = take_floats(&g, (size_t)G * T * d), *v = take_floats(&g, (size_t)G * T * d);
    const float *wo = take_floats(&g, (size_t)width * H * d), *frequency = take_floats(&g, d / 2);
    const backend *b = &backend_ref;
    backend_device *on = g.on = case_device(b, NULL);
    dev sums = b->alloc(on, (size_t)H * T), row_log = b->alloc(on, (size_t)H * T), norms = b->alloc(on, (size_t)H * T),
        dq = b->alloc(on, (size_t)T * H * d);
    prefix_kv kv = {b->alloc(on, (size_t)G * T * d), b->alloc(on, (size_t)G * T * d), T, {NULL}};
    dev_matrix w = backend_matrix(on, wo, width, H * d, false);
    attention_shape s = attention_heads(H, G, d);
    b->upload(on, dq, q, (size_t)T * H * d);
    b->upload(on, kv.k, k, (size_t)G * T * d);
    b->upload(on, kv.v, v, (size_t)G * T * d);
    b->column_sums(on, sums, row_log, dq, &kv, 0, s);
    b->output_norms(on, norms, &kv, w, s);
    b->release(on, row_log), b->release(on, dq), b->release(on, kv.k), b->release(on, kv.v), b->matrix_release(on, &w);
    g.view = (layer_view){.n_tokens = T,
                          .n_heads = H,
                          .n_kv_heads = G,
                          .head_dim = d,
                          .rope_dim = d,
                          .rope_frequency = frequency,
                          .q_raw = q_raw,
                          .q = q,
                          .k = k,
                          .v = v,
                          .column_sums = sums.address,
                          .output_norms = norms.address,
                          .n_queries = T};
    return g;
}

static void golden_close(golden *g)
{
    backend_ref.release(g->on, (dev){(float *)(uintptr_t)g->view.column_sums});
    backend_ref.release(g->on, (dev){(float *)(uintptr_t)g->view.output_norms});
    backend_ref.close(g->on);
    file_unmap(&g->file);
}

// Puts the n best positions of s in `keep`, ascending. Of equal scores, the lower position wins.
static void best(uint32_t *keep, const float *s, uint32_t T, uint32_t n)
{
    uint32_t found = 0;
    for (uint32_t j = 0; j < T && found < n; j++) {
        uint32_t better = 0;
        for (uint32_t i = 0; i < T; i++) better += s[i] > s[j] || (s[i] == s[j] && i < j);
        if (better < n) keep[found++] = j;
    }
}

static float *ranked(const char *text, const layer_view *v, uint32_t keep)
{
    metric m = case_metric(text), base;
    uint32_t budgets[8];
    float *s = case_score(text, v), *first = metric_base(&m, &base) ? case_score(base.spec, v) : NULL;
    for (uint32_t g = 0; g < v->n_kv_heads; g++) budgets[g] = keep;
    help_ok(metric_rank(&m, first, s, v->n_kv_heads, v->n_tokens, budgets, s, err));
    free(first);
    return s;
}

// Returns the largest difference in any head, relative to the range of the head's ranked positions.
static double range_error(const float *got, const float *want, const layer_view *v, uint32_t sinks, uint32_t tail)
{
    double worst = 0;
    for (uint32_t g = 0; g < v->n_kv_heads; g++) {
        double low = INFINITY, high = -INFINITY, error = 0;
        for (uint32_t j = sinks; j < v->n_tokens - tail; j++) {
            size_t i = (size_t)g * v->n_tokens + j;
            low = fmin(low, want[i]), high = fmax(high, want[i]);
            error = fmax(error, fabs((double)got[i] - want[i]));
        }
        ck_assert_double_gt(high, low);
        worst = fmax(worst, error / (high - low));
    }
    return worst;
}

UNIT_TEST(test_against_other_code)
{
    golden g = golden_open();
    uint32_t kept_sets = 0;
    for (uint32_t c = 0; c < g.cases; c++) {
        char name[NAME_SIZE];
        memcpy(name, g.at, NAME_SIZE);
        g.at += NAME_SIZE;
        uint32_t sinks = take_u32(&g), tail = take_u32(&g), keep = take_u32(&g), n = take_u32(&g);
        const unsigned char *want = g.at;
        g.at += (size_t)n * 4;
        if (keep == 0) {
            float *s = case_score(name, &g.view);
            double error = range_error(s, (const float *)(const void *)want, &g.view, sinks, tail);
            ck_assert_msg(error <= 2e-5, "%s: differs by %g of the head's range", name, error);
            free(s);
            continue;
        }
        float *s = ranked(name, &g.view, keep);
        uint32_t got[256];
        for (uint32_t h = 0; h < g.view.n_kv_heads; h++) {
            best(got, s + (size_t)h * g.view.n_tokens, g.view.n_tokens, keep);
            ck_assert_msg(memcmp(got, want + (size_t)h * keep * 4, keep * 4) == 0,
                          "%s: head %u keeps other positions than the peer", name, h);
        }
        free(s);
        kept_sets++;
    }
    ck_assert_ptr_eq(g.at, g.file.data + g.file.size);
    ck_assert_uint_ge(g.cases, 41);
    ck_assert_uint_ge(kept_sets, 7);
    golden_close(&g);
}

// One spelling of every metric there is, small enough for the golden layer.
static const char *const EVERY[] = {"snapkv:kvpress",
                                    "snapkv:lukv",
                                    "snapkv:adakv",
                                    "snapkv:factory",
                                    "snapkv:keydiff",
                                    "keydiff",
                                    "keydiff:anchor=raw",
                                    "keydiff:anchor=median",
                                    "keydiff:similarity=dot",
                                    "keydiff:similarity=euclid",
                                    "ea:kvpress",
                                    "ea:lukv",
                                    "lagkv:kvpress:lag=32",
                                    "lagkv:paper:lag=32:cross=1",
                                    "lagkv:paper:lag=32:mode=local",
                                    "lagkv:paper:lag=32:mode=l2norm",
                                    "morphkv",
                                    "morphkv:fusion=max",
                                    "rocketkv",
                                    "h2o",
                                    "h2o:kvpress",
                                    "h2o:half",
                                    "tova",
                                    "tova:scope=group",
                                    "knorm",
                                    "streaming",
                                    "streaming:kvpress",
                                    "random",
                                    "critical+snapkv:lukv"};
enum { N_EVERY = sizeof EVERY / sizeof *EVERY };

UNIT_TEST(test_bits_over_threads)
{
    golden g = golden_open();
    size_t n = (size_t)g.view.n_kv_heads * g.view.n_tokens;
    for (int i = 0; i < N_EVERY; i++) {
        omp_set_num_threads(1);
        float *one = case_score(EVERY[i], &g.view);
        omp_set_num_threads(3);
        float *three = case_score(EVERY[i], &g.view);
        case_same(EVERY[i], three, one, n);
        free_all(one, three);
    }
    golden_close(&g);
}

UNIT_TEST(test_every_scorer_is_tried)
{
    for (size_t i = 0; i < scorer_count; i++) {
        bool found = false;
        for (int k = 0; k < N_EVERY; k++) {
            metric m = case_metric(EVERY[k]);
            found = found || m.kind == scorer_list[i];
        }
        ck_assert_msg(found, "%s:%s stands in no test", scorer_list[i]->spec.name,
                      scorer_list[i]->spec.variant ? scorer_list[i]->spec.variant : "");
    }
}

// Decode-time policies see one KV head at a time, and only the last queries.
UNIT_TEST(test_views_of_one_head)
{
    golden g = golden_open();
    const layer_view *all = &g.view;
    uint32_t T = all->n_tokens, d = all->head_dim, group = all->n_heads / all->n_kv_heads, few = 64;
    for (int i = 0; i < N_EVERY; i++) {
        metric m = case_metric(EVERY[i]);
        if (strcmp(m.kind->spec.name, "tova") == 0 && metric_value(&m, "scope", 1) == 0) continue; // mixes the heads
        if (strncmp(EVERY[i], "ea", 2) == 0 || strncmp(EVERY[i], "snapkv", 6) == 0 || m.base) continue; // see below
        float *want = case_score(EVERY[i], all);
        for (uint32_t h = 0; h < all->n_kv_heads; h++) {
            float *q = case_alloc((size_t)few * group * d, sizeof *q);
            for (uint32_t r = 0; r < few; r++)
                memcpy(q + (size_t)r * group * d, all->q + (((size_t)T - few + r) * all->n_heads + h * group) * d,
                       group * d * sizeof *q);
            layer_view v = *all;
            v.q = q, v.n_queries = few, v.n_heads = group, v.n_kv_heads = 1, v.first_kv_head = h;
            v.k += (size_t)h * T * d;
            v.v += (size_t)h * T * d;
            v.column_sums += (size_t)h * group * T;
            v.output_norms += (size_t)h * group * T;
            float *got = case_score(EVERY[i], &v);
            uint32_t ranked_tokens = T - 64; // a window is filled with the layer's maximum, here the head's
            case_near(EVERY[i], got, want + (size_t)h * T, ranked_tokens, 1e-6);
            free_all(got, q);
        }
        free(want);
    }
    golden_close(&g);
}

UNIT_TEST(test_snapkv_from_the_windows_queries)
{
    golden g = golden_open();
    layer_view v = g.view;
    v.n_queries = 32;
    v.q += (size_t)(v.n_tokens - 32) * v.n_heads * v.head_dim;
    float *want = case_score("snapkv:lukv", &g.view), *got = case_score("snapkv:lukv", &v);
    case_same("snapkv:lukv", got, want, (size_t)v.n_kv_heads * v.n_tokens);
    metric m = case_metric("snapkv:kvpress");
    help_fails(metric_score(&m, &v, got, err), KVB_ARGUMENT, "last 32 queries, expected at least 64");
    free_all(want, got);
    golden_close(&g);
}

// After an eviction, keys are closer together than in the text. Metrics that go by position must score them as before.
UNIT_TEST(test_positions_of_a_cut_cache)
{
    golden g = golden_open();
    uint32_t T = g.view.n_tokens, G = g.view.n_kv_heads, kept = T / 3;
    uint32_t *positions = case_alloc((size_t)G * kept, sizeof *positions);
    for (uint32_t h = 0; h < G; h++)
        for (uint32_t j = 0; j < kept; j++)
            positions[h * kept + j] = j < 4 ? j : T - 3 * (kept - 1 - j) - 1 - (j + 1 < kept ? h : 0);
    layer_view v = g.view;
    v.n_tokens = v.n_queries = kept, v.positions = positions;
    static const char *const by_position[] = {"random", "streaming"};
    for (int i = 0; i < 2; i++) {
        float *whole = case_score(by_position[i], &g.view), *cut = case_score(by_position[i], &v);
        for (uint32_t h = 0; h < G; h++)
            for (uint32_t j = 0; j < kept; j++)
                ck_assert_float_eq(cut[h * kept + j], whole[h * T + positions[h * kept + j]]);
        free_all(whole, cut);
    }
    free(positions);
    golden_close(&g);
}

UNIT_TEST(test_random_recall)
{
    enum { HEADS = 8, TOKENS = 500, SEEDS = 40, KEEP = 100 };
    layer_view v = {.n_tokens = TOKENS, .n_heads = HEADS, .n_kv_heads = HEADS, .n_queries = TOKENS};
    double hits = 0, n = (double)HEADS * SEEDS;
    for (int seed = 0; seed < SEEDS; seed++) { // how many of the first KEEP positions are chosen?
        char text[32];
        snprintf(text, sizeof text, "random:seed=%d", seed);
        v.layer = (uint32_t)seed % 3;
        float *s = case_score(text, &v);
        uint32_t keep[KEEP];
        for (uint32_t g = 0; g < HEADS; g++) {
            best(keep, s + g * TOKENS, TOKENS, KEEP);
            for (uint32_t i = 0; i < KEEP; i++) hits += keep[i] < KEEP;
        }
        free(s);
    }
    double p = (double)KEEP / TOKENS, recall = hits / (n * KEEP), sigma = sqrt(p * (1 - p) / (n * KEEP));
    ck_assert_msg(fabs(recall - p) <= 3 * sigma, "recall %g, expected %g +- %g", recall, p, 3 * sigma);
    float *a = case_score("random", &v), *b = case_score("random:seed=2", &v);
    ck_assert_int_ne(memcmp(a, b, TOKENS * sizeof *a), 0);
    ck_assert_int_ne(memcmp(a, a + TOKENS, TOKENS * sizeof *a), 0); // heads differ
    free_all(a, b);
}

UNIT_TEST(test_streaming_keeps_sinks_and_the_last)
{
    enum { T = 50, KEEP = 12 };
    layer_view v = {.n_tokens = T, .n_heads = 1, .n_kv_heads = 1, .n_queries = T};
    static const char *const texts[] = {"streaming", "streaming:kvpress"};
    for (int i = 0; i < 2; i++) {
        uint32_t keep[KEEP];
        float *s = ranked(texts[i], &v, KEEP);
        best(keep, s, T, KEEP);
        for (uint32_t j = 0; j < KEEP; j++) ck_assert_uint_eq(keep[j], j < 4 ? j : T - KEEP + j);
        free(s);
    }
}

// The published one-shot compression keeps int(r lag) tokens of every partition but the last, and all sinks, the last
// partition and the rest: methods.md 3.4 counts 3472 for T = 20496, lag 1024, r = 1/8.
UNIT_TEST(test_lagkv_shares)
{
    enum { SINK = 16, LAG = 64, PARTS = 5, REST = 11, T = SINK + PARTS * LAG + REST, D = 8 };
    layer_view v = {.n_tokens = T, .n_heads = 2, .n_kv_heads = 2, .head_dim = D, .n_queries = T};
    float *k = case_floats(2 * T * D, 1, 0), *values = case_floats(2 * T * D, 1, 0);
    v.k = k, v.v = values;
    for (uint32_t j = 0; j < T; j++) k[j * D + 3] = 0.25f; // a channel that never changes
    float *s = case_score("lagkv:paper:lag=64", &v);
    for (uint32_t share = 8; share <= LAG; share += 8) {
        uint32_t n = SINK + share * (PARTS - 1) + LAG + REST, keep[T], count[PARTS] = {0};
        for (uint32_t g = 0; g < 2; g++) {
            memset(count, 0, sizeof count);
            best(keep, s + g * T, T, n);
            for (uint32_t i = 0; i < n; i++)
                if (keep[i] >= SINK && keep[i] < SINK + PARTS * LAG) count[(keep[i] - SINK) / LAG]++;
            for (uint32_t p = 0; p < PARTS; p++) ck_assert_uint_eq(count[p], p + 1 < PARTS ? share : LAG);
        }
    }
    free_all(s, k, values);
    uint32_t t = 20496, lag = 1024, sink = 16, parts = (t - sink) / lag;
    ck_assert_uint_eq(sink + lag / 8 * (parts - 1) + lag + (t - sink) % lag, 3472);
}

UNIT_TEST(test_two_stages)
{
    golden g = golden_open();
    uint32_t T = g.view.n_tokens;
    size_t n = (size_t)g.view.n_kv_heads * T;
    // share 0 ranks by the weighted scores, share 1 by the wrapped metric
    float *none = ranked("critical:share=0+knorm", &g.view, 60),
          *weighted = case_score("critical:share=0+knorm", &g.view);
    case_same("share 0", none, weighted, n);
    float *all = ranked("critical:share=1+knorm", &g.view, 60), *norm = case_score("knorm", &g.view);
    uint32_t a[60] = {0}, b[60] = {0};
    best(a, all, T, 60);
    best(b, norm, T, 60);
    ck_assert_int_eq(memcmp(a, b, sizeof a), 0);
    best(a, none, T, 60);
    ck_assert_int_ne(memcmp(a, b, sizeof a), 0); // and the two differ
    free_all(none, weighted, all, norm);
    metric m = case_metric("critical+knorm"), profiled;
    ck_assert(metric_profiled_as(&m, &profiled));
    ck_assert_str_eq(profiled.spec, "critical:share=0+knorm");
    help_ok(metric_check_nested(&profiled, err));
    metric half = case_metric("h2o:half");
    ck_assert(!metric_profiled_as(&half, &profiled));
    float *s = case_score("critical+knorm", &g.view);
    help_fails(metric_rank(&m, NULL, s, 2, T, (uint32_t[]){5, 5}, s, err), KVB_ARGUMENT, "needs the scores of knorm");
    free(s);
    golden_close(&g);
}

UNIT_TEST(test_refusals)
{
    static const char *const other[][2] = {{"h2o:half", "half of every budget"},
                                           {"streaming:kvpress", "0 and 1 by the budget"},
                                           {"critical+snapkv", "critical:share=0+METRIC"},
                                           {"critical:share=0.1+keydiff", "share of the budget"}};
    metric nested = case_metric("critical:share=0+snapkv");
    help_ok(metric_check_nested(&nested, err));
    for (int i = 0; i < N_EVERY; i++) {
        metric m = case_metric(EVERY[i]);
        if (!m.kind->why_not_nested) help_ok(metric_check_nested(&m, err));
    }
    for (int i = 0; i < 4; i++) {
        metric m = case_metric(other[i][0]);
        help_fails(metric_check_nested(&m, err), KVB_ARGUMENT, other[i][1]);
    }
    layer_view v = {.layer = 3, .n_tokens = 100, .n_heads = 1, .n_kv_heads = 1, .head_dim = 4, .n_queries = 100};
    float s[100], k[400] = {0};
    static const char *const lacks[][2] = {{"snapkv", "layer 3: needs q,"}, {"keydiff", "needs k,"},
                                           {"ea", "needs q_raw,"},          {"lagkv", "needs k,"},
                                           {"h2o", "needs column_sums"},    {"critical+random", "needs output_norms"}};
    for (int i = 0; i < 6; i++) {
        metric m = case_metric(lacks[i][0]);
        help_fails(metric_score(&m, &v, s, err), KVB_ARGUMENT, lacks[i][1]);
    }
    v.k = v.v = k;
    metric lag = case_metric("lagkv"), norm = case_metric("knorm");
    help_fails(metric_score(&lag, &v, s, err), KVB_ARGUMENT, "100 tokens, expected at least 260");
    k[37] = NAN;
    help_fails(metric_score(&norm, &v, s, err), KVB_NUMERIC, "layer 3, KV head 0, position 9");
    v.q = k, v.n_queries = 0;
    metric tova = case_metric("tova");
    help_fails(metric_score(&tova, &v, s, err), KVB_ARGUMENT, "0 queries");
}

UNIT_MAIN("profiler golden")
