// What several metrics have in common (scorer_parts.h), against plain sums.
#include "profiler/metric/scorer_parts.h"
#include "test_profiler_views.h"

enum { T = 37, QUERIES = 12 };

// Computes the attention of head h's query of the view to keys 0 .. seen - 1, with the model's softcap and sinks.
static void plain_attention(double want[T], const layer_view *v, uint32_t h, uint32_t query, uint32_t seen)
{
    double sum = v->sinks ? exp(v->sinks[h]) : 0;
    memset(want, 0, T * sizeof *want);
    for (uint32_t j = 0; j < seen; j++) {
        const float *q = v->q + ((size_t)query * v->n_heads + h) * v->head_dim;
        double score = dot(q, key_of(v, h / (v->n_heads / v->n_kv_heads), j), v->head_dim) / sqrt(v->head_dim);
        want[j] = exp(v->softcap > 0 ? v->softcap * tanh(score / v->softcap) : score);
        sum += want[j];
    }
    for (uint32_t j = 0; j < seen; j++) want[j] /= sum;
}

// _i: 0, plain; 1, with a softcap; 2, with sinks; 3, with both
UNIT_ROUNDS(test_attention_rows, 4)
{
    for (int i = 0; i < N_SHAPES; i++) {
        shape s = SHAPES[i];
        layer_view whole = view_make(s, T, 1), v = whole;
        float got[4 * T], *sinks = case_floats(s.H, 2, 1);
        v.n_queries = QUERIES; // the last ones
        v.q = whole.q + (size_t)(T - QUERIES) * s.H * s.d;
        if (_i & 1) v.softcap = 1.5f;
        if (_i & 2) v.sinks = sinks;
        for (uint32_t h = 0; h < s.H; h++) {
            attention_rows(got, &v, h, 5, 4);
            for (uint32_t w = 0; w < 4; w++) {
                double want[T], worst = 0;
                uint32_t seen = T - QUERIES + 5 + w + 1;
                plain_attention(want, &v, h, 5 + w, seen);
                for (uint32_t j = 0; j < T; j++) worst = fmax(worst, fabs(got[w * T + j] - want[j]));
                ck_assert_msg(worst < 2e-6, "shape %d, head %u, row %u: %g", i, h, w, worst);
                for (uint32_t j = seen; j < T; j++) ck_assert(got[w * T + j] == 0);
            }
        }
        view_free(&whole);
        free(sinks);
    }
}

UNIT_TEST(test_group_attention_rows)
{
    for (int i = 0; i < N_SHAPES; i++) {
        shape s = SHAPES[i];
        layer_view v = view_make(s, T, 1);
        for (uint32_t g = 0; g < s.G; g++) {
            float got[2 * T], scratch[2 * T];
            double want[T], sum[T] = {0};
            group_attention_rows(got, scratch, &v, g, T - 2, 2);
            for (uint32_t h = g * (s.H / s.G); h < (g + 1) * (s.H / s.G); h++) {
                plain_attention(want, &v, h, T - 1, T);
                for (uint32_t j = 0; j < T; j++) sum[j] += want[j];
            }
            for (uint32_t j = 0; j < T; j++) ck_assert(fabs(got[T + j] - sum[j]) < 1e-5);
        }
        view_free(&v);
    }
}

UNIT_TEST(test_pool_row)
{
    float *x = case_floats(T, 1, 0), out[T], scratch[T];
    for (uint32_t kernel = 1; kernel <= 2 * T + 1; kernel += 2)
        for (int top = 0; top < 2; top++) {
            pool_row(out, x, scratch, T, kernel, top);
            for (int j = 0; j < T; j++) {
                double sum = 0, most = -INFINITY;
                for (int k = j - (int)kernel / 2; k <= j + (int)kernel / 2; k++) {
                    if (k < 0 || k >= T) continue;
                    sum += x[k];
                    most = fmax(most, x[k]);
                }
                ck_assert_msg(fabs(out[j] - (top ? most : sum / kernel)) < 1e-6, "kernel %u, position %d", kernel, j);
            }
        }
    free(x);
}

UNIT_TEST(test_tails_and_checks)
{
    metric m;
    help_ok(metric_parse(&m, "snapkv:kvpress:window=20", err));
    layer_view v = {.n_tokens = 5, .n_kv_heads = 2, .n_heads = 2, .n_queries = 19};
    float s[10] = {1, 4, 2, 9, 9, 3, 3, 3, 9, 9};
    fill_tail(s, &v, 2, 0.5f);
    const float want[10] = {1, 4, 2, 4.5f, 4.5f, 3, 3, 3, 4.5f, 4.5f};
    case_same("tail", s, want, 10);
    help_fails(check_window(&m, &v, 20, err), KVB_ARGUMENT, "last 19 queries, expected at least 20");
    v.n_queries = 20;
    help_ok(check_window(&m, &v, 20, err));
    help_ok(check_kernel(&m, err)); // 7, its default
}

// LagKV's weighted scores of a partition are added to `out`; a channel whose reference is constant counts as 0.
UNIT_TEST(test_lagkv_partition)
{
    enum { N = 6, REF = 4, D = 5 };
    float *z = case_floats((size_t)N * D, 1, 0), *ref = case_floats((size_t)REF * D, 1, 0), out[N], scratch[3 * D + N];
    for (int r = 0; r < REF; r++) ref[r * D + 2] = 0.25f;
    double spread[N], sum = 0;
    for (int j = 0; j < N; j++) {
        double x[D], mean = 0, square = 0;
        for (int c = 0; c < D; c++) {
            double low = INFINITY, high = -INFINITY;
            for (int r = 0; r < REF; r++) low = fmin(low, ref[r * D + c]), high = fmax(high, ref[r * D + c]);
            x[c] = high > low ? (z[j * D + c] - low) / (high - low) : 0;
            mean += x[c] / D;
        }
        for (int c = 0; c < D; c++) square += (x[c] - mean) * (x[c] - mean);
        spread[j] = sqrt(square / D); // of a population or of a sample: told apart below
        sum += exp(spread[j]);
        out[j] = 10;
    }
    lagkv_partition(out, 0.5f, z, N, ref, REF, D, scratch);
    double sample = 0, other = 0, rest = 0;
    for (int j = 0; j < N; j++) rest += exp(spread[j] * sqrt(D / (D - 1.0)));
    for (int j = 0; j < N; j++) {
        sample = fmax(sample, fabs(out[j] - 10 - 0.5 * exp(spread[j] * sqrt(D / (D - 1.0))) / rest));
        other = fmax(other, fabs(out[j] - 10 - 0.5 * exp(spread[j]) / sum));
    }
    ck_assert_msg(sample < 2e-6 && other > 1e-4, "sample's deviation: %g, population's: %g", sample, other);
    free(z);
    free(ref);
}

UNIT_TEST(test_snapkv_scores)
{
    shape s = SHAPES[4];
    layer_view v = view_make(s, T, 1);
    metric m;
    float *want = case_alloc((size_t)s.G * T, sizeof *want), *got = case_alloc((size_t)s.G * T, sizeof *got);
    const snapkv_form form = {.window = 8, .kernel = 5, .tail_above = 1};
    help_ok(metric_parse(&m, "snapkv:kvpress:window=8:kernel=5", err));
    help_ok(metric_score(&m, &v, want, err));
    help_ok(snapkv_scores(&m, &v, &form, got, err));
    case_same("the form of kvpress", got, want, (size_t)s.G * T);
    const snapkv_form wide = {.window = 8, .kernel = 5, .max_pool = true, .tail_above = 1};
    help_ok(snapkv_scores(&m, &v, &wide, got, err));
    size_t differ = 0;
    for (size_t j = 0; j < (size_t)s.G * T; j++) differ += got[j] > want[j];
    ck_assert_uint_gt(differ, T);
    free(want);
    free(got);
    view_free(&v);
}

UNIT_MAIN_EACH("scorers' parts", help_setup, help_teardown)
