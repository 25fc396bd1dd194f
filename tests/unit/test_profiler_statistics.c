// Stored query statistics: gathered as their definition says, whatever the cut into texts; written, read back and
// refused when damaged; and Expected Attention with those of the context itself is Expected Attention.
#include "formats/file_read.h"
#include "profiler/metric/query_statistics.h"
#include "test_profiler_cases.h"

enum { L = 2, H = 4, G = 2, D = 8, T = 70, SKIP = 4 };

typedef struct layer_data {
    float *q, *k, *v, frequency[D / 2];
} layer_data;

static layer_view make_layer(layer_data *a, uint32_t layer, uint32_t n)
{
    a->q = case_floats((size_t)n * H * D, 1, 3 + layer); // far from zero, where squares would cancel
    a->k = case_floats((size_t)G * n * D, 1, 0.2);
    a->v = case_floats((size_t)G * n * D, 1, 0.3);
    for (int p = 0; p < D / 2; p++) a->frequency[p] = (float)pow(10000, -2.0 * p / D);
    return (layer_view){.layer = layer,
                        .n_tokens = n,
                        .n_heads = H,
                        .n_kv_heads = G,
                        .head_dim = D,
                        .rope_dim = D,
                        .rope_frequency = a->frequency,
                        .q_raw = a->q,
                        .k = a->k,
                        .v = a->v,
                        .n_queries = n};
}

static void free_layer(layer_data *a)
{
    free(a->q), free(a->k), free(a->v);
}

// Two texts of both layers; returns the statistics, and the queries of layer 1, head 2 in `all` [*n, D].
static query_statistics *gather_two(float *all, uint32_t *n)
{
    query_gather *g = query_gather_open(L, H, D, SKIP);
    query_statistics *s;
    help_fails(query_gather_finish(g, &s, err), KVB_ARGUMENT, "at least two");
    layer_observer observer = query_gather_observer(g);
    *n = 0;
    for (uint32_t text = 0; text < 3; text++)
        for (uint32_t layer = 0; layer < L; layer++) {
            layer_data a;
            uint32_t tokens = text == 2 ? SKIP : T + 30 * text; // the last has nothing behind its sinks
            layer_view view = make_layer(&a, layer, tokens);
            help_ok(observer.see(observer.context, &view, err));
            for (uint32_t i = SKIP; layer == 1 && i < tokens; i++)
                memcpy(all + (size_t)(*n)++ * D, a.q + ((size_t)i * H + 2) * D, D * sizeof(float));
            free_layer(&a);
        }
    ck_assert_uint_eq(query_gather_count(g), *n);
    help_ok(query_gather_finish(g, &s, err));
    query_statistics_show(s, &observer);
    ck_assert(observer.stored_mean == s->mean && observer.stored_covariance == s->covariance);
    query_statistics_show(NULL, &observer);
    ck_assert(!observer.stored_mean && !observer.stored_covariance);
    query_gather_close(g);
    return s;
}

UNIT_TEST(gathered_as_defined)
{
    float all[3 * T * D];
    uint32_t n;
    query_statistics *s = gather_two(all, &n);
    const float *mean = s->mean + (1 * H + 2) * D, *covariance = s->covariance + (size_t)(1 * H + 2) * D * D;
    for (int a = 0; a < D; a++)
        for (int b = 0; b < D; b++) {
            double ma = 0, mb = 0, sum = 0;
            for (uint32_t i = 0; i < n; i++)
                ma += all[i * D + (uint32_t)a] / (double)n, mb += all[i * D + (uint32_t)b] / (double)n;
            for (uint32_t i = 0; i < n; i++) sum += (all[i * D + (uint32_t)a] - ma) * (all[i * D + (uint32_t)b] - mb);
            ck_assert(fabs(mean[a] - ma) < 1e-5 && fabs(covariance[a * D + b] - sum / (n - 1)) < 1e-5);
        }
    query_statistics_free(s);
}

UNIT_TEST(files)
{
    float all[3 * T * D];
    uint32_t n;
    const char *path = help_path("queries.safetensors");
    query_statistics *s = gather_two(all, &n), *back;
    memset(s->model_sha256, 'a', 64);
    help_ok(query_statistics_write(s, path, 2, n, err));
    model m = {.config = {.n_layers = L, .n_heads = H, .head_dim = D}};
    help_ok(query_statistics_open(&back, path, &m, err));
    case_same("mean", back->mean, s->mean, L * H * D);
    case_same("covariance", back->covariance, s->covariance, L * H * D * D);
    ck_assert_uint_eq(strlen(back->sha256), 64);
    ck_assert_str_eq(back->model_sha256, s->model_sha256);
    query_statistics_free(back);
    memset(m.sha256, 'b', 64);
    help_fails(query_statistics_open(&back, path, &m, err), KVB_MISMATCH, "query statistics of another model");
    m.config.n_layers++;
    help_fails(query_statistics_open(&back, path, &m, err), KVB_MISMATCH, "another shape");
    help_ok(query_statistics_open(&back, NULL, &m, err));
    ck_assert_ptr_null(back);
    file_view view;
    help_ok(file_map(&view, path, err));
    unsigned char *bytes = case_alloc(view.size, 1);
    memcpy(bytes, view.data, view.size);
    for (size_t size = 0; size < view.size; size += 37) // cut anywhere
        ck_assert_int_ne(query_statistics_parse(&back, bytes, size, "cut", L, H, D, NULL), KVB_OK);
    memset(bytes + view.size - 4, 0xff, 4); // a NaN
    help_fails(query_statistics_parse(&back, bytes, view.size, "nan", L, H, D, err), KVB_NUMERIC, "not a number");
    file_unmap(&view);
    free(bytes);
    query_statistics_free(s);
}

UNIT_TEST(of_the_context_itself)
{
    query_gather *g = query_gather_open(1, H, D, SKIP);
    query_statistics *s;
    layer_data a;
    layer_view view = make_layer(&a, 0, T);
    layer_observer observer = query_gather_observer(g);
    help_ok(observer.see(observer.context, &view, err));
    help_ok(query_gather_finish(g, &s, err));
    for (size_t i = 0; i < H * D * D; i++) s->covariance[i] *= (float)(T - SKIP - 1) / (T - SKIP); // divisor n
    metric m = case_metric("ea:stored=1");
    float *got = case_alloc((size_t)G * T, sizeof *got);
    help_fails(metric_score(&m, &view, got, err), KVB_ARGUMENT, "--query-statistics");
    view.query_mean = s->mean;
    view.query_covariance = s->covariance;
    help_ok(metric_score(&m, &view, got, err));
    float *want = case_score("ea", &view);
    case_near("own statistics", got, want, (size_t)G * T, 1e-4);
    free(want);
    s->mean[3] += 1; // others are others
    help_ok(metric_score(&m, &view, got, err));
    want = case_score("ea", &view);
    double far = 0;
    for (size_t i = SKIP; i < T; i++) far = fmax(far, fabs((double)got[i] - want[i]));
    ck_assert(far > 1e-3);
    free(want), free(got);
    query_statistics_free(s);
    query_gather_close(g);
    free_layer(&a);
}

UNIT_MAIN_EACH("stored query statistics", help_setup, help_teardown)
