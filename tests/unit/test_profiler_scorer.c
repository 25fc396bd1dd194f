// KeyDiff's ranks, and Expected Attention against its formula (methods.md 3.2, 3.3), written out in double with whole
// matrices; golden data judges the others (test_profiler_golden.c).
#include "formats/need.h"
#include "test_profiler_views.h"

// ---- KeyDiff ----

// KeyDiff ranks like -sum over i of cos(k_j, k_i), wherever two of those sums really differ.
UNIT_TEST(test_keydiff_ranks_as_pairs_do)
{
    enum { T = 240 };
    for (int i = 0; i < N_SHAPES; i++) {
        layer_view v = view_make(SHAPES[i], T, 1);
        float *got = case_score("keydiff", &v);
        int compared = 0;
        for (uint32_t g = 0; g < SHAPES[i].G; g++) {
            double pairs[T] = {0};
            for (uint32_t a = 0; a < T; a++)
                for (uint32_t b = 0; b < T; b++) {
                    const float *ka = key_of(&v, g, a), *kb = key_of(&v, g, b);
                    uint32_t d = SHAPES[i].d;
                    pairs[a] -= dot(ka, kb, d) / sqrt(dot(ka, ka, d) * dot(kb, kb, d));
                }
            for (uint32_t a = 0; a < T; a++)
                for (uint32_t b = 0; b < T; b++)
                    if (pairs[a] > pairs[b] + 1e-4) {
                        if (!(got[g * T + a] > got[g * T + b])) ck_abort_msg("head %u: %u and %u", g, a, b);
                        compared++;
                    }
        }
        ck_assert_int_gt(compared, T * T / 3 * (int)SHAPES[i].G);
        free(got);
        view_free(&v);
    }
}

UNIT_TEST(test_keydiff_degenerate)
{
    enum { T = 4 };
    const float opposite[2 * T] = {1, 0, -1, 0, 0, 2, 0, -2}, zeros[2 * T] = {0},
                             one_zero[2 * T] = {3, 0, 0, 0, 5, 0, 1, 0};
    const float *const keys[] = {opposite, zeros, one_zero};
    static const float want[3][T] = {{0, 0, 0, 0}, {0, 0, 0, 0}, {-1, 0, -1, -1}};
    for (int i = 0; i < 3; i++) {
        layer_view v = {.n_tokens = T, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .rope_dim = 2, .k = keys[i]};
        float *got = case_score("keydiff", &v);
        case_near("keydiff", got, want[i], T, 1e-6);
        free(got);
    }
}

// ---- Expected Attention ----

typedef struct ea_case {
    const char *text;
    uint32_t future, sinks;
    double epsilon;
    bool covariance, value_norm, sinks_in_softmax;
} ea_case;

// If the rotation scales queries, as with yarn, scores are those of queries that were scaled before it.
UNIT_TEST(test_expected_attention_of_a_lengthened_rotation)
{
    enum { T = 60 };
    shape s = SHAPES[4];
    layer_view v = view_make(s, T, 0.7);
    float *longer = case_alloc((size_t)T * s.H * s.d, sizeof *longer);
    v.rope_attention = 1.25f;
    float *got = case_score("ea:kvpress", &v);
    for (size_t i = 0; i < (size_t)T * s.H * s.d; i++) longer[i] = 1.25f * v.q_raw[i];
    const float *as_it_was = v.q_raw;
    v.rope_attention = 0, v.q_raw = longer;
    float *want = case_score("ea:kvpress", &v), *shorter;
    v.q_raw = as_it_was;
    shorter = case_score("ea:kvpress", &v);
    double most = 0;
    for (uint32_t i = 0; i < s.G * T; i++) {
        ck_assert_double_eq_tol(got[i], want[i], 1e-5 * (1 + fabs(want[i])));
        most = fmax(most, fabs(got[i] - shorter[i]));
    }
    ck_assert_double_gt(most, 1e-4); // it matters
    free_all(longer, got, want, shorter);
    view_free(&v);
}

// Computes the mean and covariance of one head's queries, each of them first turned by the mean rotation: the same as R
// mu and R C R^T.
static void naive_statistics(double *mean, double *covariance, const layer_view *v, uint32_t h, const ea_case *e)
{
    uint32_t T = v->n_tokens, d = v->head_dim, n = T - e->sinks;
    double *turned = case_alloc((size_t)T * d, sizeof *turned), *at = case_alloc(d, sizeof *at);
    double *r = case_alloc((size_t)d * d, sizeof *r);
    float *unit = case_alloc(d, sizeof *unit);
    for (uint32_t c = 0; c < d; c++) { // column c of R: the mean of the rotated unit vector c
        unit[c] = 1;
        for (uint32_t f = 0; f < e->future; f++) {
            rotate(at, unit, d, v->rope_frequency, (double)T + f);
            for (uint32_t i = 0; i < d; i++) r[(size_t)i * d + c] += at[i] / e->future;
        }
        unit[c] = 0;
    }
    memset(mean, 0, d * sizeof *mean);
    memset(covariance, 0, (size_t)d * d * sizeof *covariance);
    for (uint32_t i = e->sinks; i < T; i++)
        for (uint32_t a = 0; a < d; a++) {
            for (uint32_t c = 0; c < d; c++)
                turned[(size_t)i * d + a] += r[(size_t)a * d + c] * v->q_raw[((size_t)i * v->n_heads + h) * d + c];
            mean[a] += turned[(size_t)i * d + a] / n;
        }
    for (uint32_t i = e->sinks; e->covariance && i < T; i++)
        for (uint32_t a = 0; a < d; a++)
            for (uint32_t b = 0; b < d; b++)
                covariance[(size_t)a * d + b] +=
                    (turned[(size_t)i * d + a] - mean[a]) * (turned[(size_t)i * d + b] - mean[b]) / n;
    free_all(turned, at, r, unit);
}

static float *naive_ea(const layer_view *v, const ea_case *e)
{
    uint32_t T = v->n_tokens, H = v->n_heads, G = v->n_kv_heads, d = v->head_dim;
    uint32_t from = e->sinks_in_softmax ? 0 : e->sinks;
    float *s = case_alloc((size_t)G * T, sizeof *s), top = -INFINITY;
    double *p = case_alloc((size_t)G * T, sizeof *p), *z = case_alloc(T, sizeof *z),
           *mean = case_alloc(d, sizeof *mean), *covariance = case_alloc((size_t)d * d, sizeof *covariance);
    for (uint32_t h = 0; h < H; h++) {
        uint32_t g = h / (H / G);
        naive_statistics(mean, covariance, v, h, e);
        for (uint32_t j = 0; j < T; j++) {
            const float *k = key_of(v, g, j);
            z[j] = 0;
            for (uint32_t a = 0; a < d; a++) {
                z[j] += mean[a] * k[a] / sqrt(d);
                for (uint32_t b = 0; b < d; b++) z[j] += k[a] * covariance[(size_t)a * d + b] * k[b] / (2.0 * d);
            }
        }
        softmax(z + from, T - from);
        for (uint32_t j = from; j < T; j++) p[(size_t)g * T + j] += z[j] * G / H;
    }
    for (uint32_t g = 0; g < G; g++)
        for (uint32_t j = from; j < T; j++) {
            const float *value = v->v + ((size_t)g * T + j) * d;
            double norm = sqrt(dot(value, value, d)), x = p[(size_t)g * T + j];
            s[(size_t)g * T + j] = (float)(e->value_norm ? (x + e->epsilon) * norm : x);
            top = fmaxf(top, s[(size_t)g * T + j]);
        }
    for (uint32_t g = 0; g < G; g++)
        for (uint32_t j = 0; j < from; j++) s[(size_t)g * T + j] = top + 1;
    free_all(p, z, mean, covariance);
    return s;
}

static void compare_ea(const ea_case *e, shape s, uint32_t T)
{
    layer_view v = view_make(s, T, 0.7);
    float *want = naive_ea(&v, e), *got = case_score(e->text, &v), top = -INFINITY;
    uint32_t from = e->sinks_in_softmax ? 0 : e->sinks;
    for (uint32_t g = 0; g < s.G; g++) {
        double error = case_row_error(got + (size_t)g * T + from, want + (size_t)g * T + from, 1, T - from);
        ck_assert_msg(error <= 2e-5, "%s: T %u, H %u, G %u, d %u: relative error %g", e->text, T, s.H, s.G, s.d, error);
        for (uint32_t j = from; j < T; j++) top = fmaxf(top, got[(size_t)g * T + j]);
    }
    for (uint32_t g = 0; g < s.G; g++) // kvpress' sinks: the layer's maximum plus one
        for (uint32_t j = 0; j < from; j++) ck_assert_float_eq(got[(size_t)g * T + j], top + 1);
    free_all(want, got);
    view_free(&v);
}

UNIT_TEST(test_expected_attention)
{
    static const ea_case cases[] = {
        {"ea", 512, 4, 0.02, true, true, false},
        {"ea:lukv", 512, 4, 0.02, true, true, true},
        {"ea:covariance=0", 512, 4, 0.02, false, true, false},
        {"ea:sinks=0:epsilon=0", 512, 0, 0, true, true, false},
        {"ea:value_norm=0:future=17", 17, 4, 0.02, true, false, false},
        {"ea:lukv:sinks=9:value_norm=0:covariance=0", 512, 9, 0.02, false, false, true},
        {"ea:future=1:epsilon=0", 1, 4, 0, true, true, false},
        {"ea:lukv:future=1:covariance=0:value_norm=0:sinks=0", 1, 0, 0.02, false, false, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int k = 0; k < N_SHAPES; k++) {
            compare_ea(&cases[i], SHAPES[k], 90);
            compare_ea(&cases[i], SHAPES[k], cases[i].sinks + 1); // one query: no covariance
        }
    compare_ea(&cases[0], SHAPES[1], 1100); // over several chunks of the statistics
    compare_ea(&cases[1], SHAPES[1], 512 + 4);
}

UNIT_TEST(test_short_contexts)
{
    static const struct {
        const char *text;
        uint32_t T;
        const char *numbers[2];
    } cases[] = {
        {"snapkv", 64, {"64 tokens", "at least 65"}},       {"snapkv:lukv", 1, {"1 tokens", "at least 33"}},
        {"snapkv:window=7", 7, {"7 tokens", "at least 8"}}, {"ea", 4, {"4 tokens", "at least 5"}},
        {"ea:lukv", 3, {"3 tokens", "at least 5"}},         {"ea:lukv:sinks=30", 29, {"29 tokens", "at least 31"}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        metric m = case_metric(cases[i].text);
        layer_view v = view_make(SHAPES[0], cases[i].T, 1);
        float *s = case_alloc((size_t)SHAPES[0].G * cases[i].T, sizeof *s);
        help_fails(metric_score(&m, &v, s, err), KVB_ARGUMENT, m.spec);
        for (int k = 0; k < 2; k++) help_fails(metric_score(&m, &v, s, err), KVB_ARGUMENT, cases[i].numbers[k]);
        free(s);
        view_free(&v);
    }
}

UNIT_MAIN("profiler scorer")
