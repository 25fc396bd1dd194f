// Every scorer against its formula (methods.md 3.1-3.3) written out in double with whole matrices, and the reading of metric names.
#include "profiler/scorer.h"
#include "test_profiler_cases.h"

typedef struct shape {
    uint32_t H, G, d;
} shape;

static const shape SHAPES[] = {{4, 4, 16}, {9, 3, 8}, {6, 1, 32}, {1, 1, 2}, {8, 2, 64}};
enum { N_SHAPES = sizeof SHAPES / sizeof *SHAPES };

// ---- inputs ----

static void rotate(double *out, const float *in, uint32_t d, const float *frequency, double at)
{
    for (uint32_t p = 0; p < d / 2; p++) {
        double c = cos(at * frequency[p]), s = sin(at * frequency[p]), a = in[p], b = in[p + d / 2];
        out[p] = a * c - b * s;
        out[p + d / 2] = b * c + a * s;
    }
}

// Queries and keys as a model has them: an offset common to all, some spread, RoPE on top; values of different lengths.
static layer_view view_make(shape s, uint32_t T, double spread)
{
    float *frequency = case_alloc(s.d / 2, sizeof *frequency), *offset = case_floats((size_t)(s.H + s.G) * s.d, 1, 0);
    float *q_raw = case_floats((size_t)T * s.H * s.d, spread, 0), *q = case_alloc((size_t)T * s.H * s.d, sizeof *q);
    float *k = case_floats((size_t)s.G * T * s.d, spread, 0), *v = case_floats((size_t)s.G * T * s.d, 1, 0.3);
    double *row = case_alloc(s.d, sizeof *row);
    for (uint32_t p = 0; p < s.d / 2; p++) frequency[p] = (float)pow(10000, -2.0 * p / s.d);
    for (size_t i = 0; i < (size_t)T * s.H; i++) {
        for (uint32_t c = 0; c < s.d; c++) q_raw[i * s.d + c] += offset[i % s.H * s.d + c];
        rotate(row, q_raw + i * s.d, s.d, frequency, (double)(i / s.H));
        for (uint32_t c = 0; c < s.d; c++) q[i * s.d + c] = (float)row[c];
    }
    for (size_t i = 0; i < (size_t)s.G * T; i++) {
        for (uint32_t c = 0; c < s.d; c++) k[i * s.d + c] += offset[(s.H + i / T) * s.d + c];
        rotate(row, k + i * s.d, s.d, frequency, (double)(i % T));
        for (uint32_t c = 0; c < s.d; c++) k[i * s.d + c] = (float)row[c];
    }
    free(offset), free(row);
    return (layer_view){.n_tokens = T,
                        .n_heads = s.H,
                        .n_kv_heads = s.G,
                        .head_dim = s.d,
                        .rope_dim = s.d,
                        .rope_frequency = frequency,
                        .q_raw = q_raw,
                        .q = q,
                        .k = k,
                        .v = v,
                        .n_queries = T};
}

static void view_free(layer_view *v)
{
    const float *all[] = {v->rope_frequency, v->q_raw, v->q, v->k, v->v};
    for (int i = 0; i < 5; i++) free((void *)(uintptr_t)all[i]);
}

static const float *key_of(const layer_view *v, uint32_t g, uint32_t j)
{
    return v->k + ((size_t)g * v->n_tokens + j) * v->head_dim;
}

static double dot(const float *a, const float *b, uint32_t d)
{
    double sum = 0;
    for (uint32_t c = 0; c < d; c++) sum += (double)a[c] * b[c];
    return sum;
}

static void softmax(double *z, uint32_t n)
{
    double top = -INFINITY, sum = 0;
    for (uint32_t j = 0; j < n; j++) top = fmax(top, z[j]);
    for (uint32_t j = 0; j < n; j++) sum += z[j] = exp(z[j] - top);
    for (uint32_t j = 0; j < n; j++) z[j] /= sum;
}

static void compare(const char *text, const layer_view *v, const float *want, double tolerance)
{
    float *got = case_score(text, v);
    double error = case_row_error(got, want, v->n_kv_heads, v->n_tokens);
    ck_assert_msg(error <= tolerance, "%s: T %u, H %u, G %u, d %u: relative error %g, at most %g", text, v->n_tokens,
                  v->n_heads, v->n_kv_heads, v->head_dim, error, tolerance);
    free(got);
}

// ---- SnapKV ----

static float *naive_snapkv(const layer_view *v, uint32_t W, int kernel, bool max_pool, double fill_above)
{
    uint32_t T = v->n_tokens, H = v->n_heads, G = v->n_kv_heads, d = v->head_dim, old = T - W;
    float *s = case_alloc((size_t)G * T, sizeof *s), top = 0;
    double *z = case_alloc(T, sizeof *z), *u = case_alloc(T, sizeof *u), *sum = case_alloc((size_t)G * T, sizeof *sum);
    for (uint32_t h = 0; h < H; h++) {
        uint32_t g = h / (H / G);
        memset(u, 0, T * sizeof *u);
        for (uint32_t w = 0; w < W; w++) {
            uint32_t at = old + w;
            for (uint32_t j = 0; j <= at; j++)
                z[j] = dot(v->q + ((size_t)at * H + h) * d, key_of(v, g, j), d) / sqrt(d);
            softmax(z, at + 1);
            for (uint32_t j = 0; j < old; j++) u[j] += z[j] / W;
        }
        for (int j = 0; j < (int)old; j++) {
            double pooled = max_pool ? -INFINITY : 0;
            for (int i = j - kernel / 2; i <= j + kernel / 2; i++) {
                bool inside = i >= 0 && i < (int)old;
                if (max_pool && inside) pooled = fmax(pooled, u[i]);
                if (!max_pool) pooled += (inside ? u[i] : 0) / kernel;
            }
            sum[(size_t)g * T + (uint32_t)j] += pooled * G / H;
        }
    }
    for (uint32_t g = 0; g < G; g++)
        for (uint32_t j = 0; j < old; j++) top = fmaxf(top, s[g * T + j] = (float)sum[(size_t)g * T + j]);
    for (uint32_t g = 0; g < G; g++)
        for (uint32_t j = old; j < T; j++) s[g * T + j] = (float)(top + fill_above);
    free(z), free(u), free(sum);
    return s;
}

// Only the positions before the window: next to a fill of "maximum + 1" any error would look small.
static void compare_snapkv(const char *text, shape s, uint32_t T, uint32_t W, int kernel, bool max_pool, bool above)
{
    layer_view v = view_make(s, T, 1);
    float *want = naive_snapkv(&v, W, kernel, max_pool, above), *got = case_score(text, &v), top = 0;
    for (uint32_t g = 0; g < s.G; g++) {
        double error = case_row_error(got + g * T, want + g * T, 1, T - W);
        ck_assert_msg(error <= 1e-5, "%s: T %u, H %u, G %u, d %u: relative error %g", text, T, s.H, s.G, s.d, error);
        for (uint32_t j = 0; j < T - W; j++) top = fmaxf(top, got[g * T + j]);
    }
    for (uint32_t g = 0; g < s.G; g++)
        for (uint32_t j = T - W; j < T; j++) ck_assert_float_eq(got[g * T + j], above ? top + 1 : top);
    free(want), free(got);
    view_free(&v);
}

START_TEST(test_snapkv)
{
    static const uint32_t lengths[] = {65, 66, 70, 200};
    for (int i = 0; i < N_SHAPES; i++)
        for (int t = 0; t < 4; t++) {
            compare_snapkv("snapkv:kvpress", SHAPES[i], lengths[t], 64, 5, false, true);
            compare_snapkv("snapkv:lukv", SHAPES[i], lengths[t] - 32, 32, 7, true, false);
        }
    compare_snapkv("snapkv:lukv", SHAPES[0], 1500, 32, 7, true, false);
}
END_TEST

START_TEST(test_snapkv_pooling)
{
    static const int kernels[] = {1, 3, 9, 255}; // the last is wider than the context
    for (int i = 0; i < 4; i++)
        for (int max_pool = 0; max_pool < 2; max_pool++)
            for (uint32_t T = 2; T <= 22; T += 5) {
                char text[96];
                snprintf(text, sizeof text, "snapkv:window=1:kernel=%d:max_pool=%d", kernels[i], max_pool);
                compare_snapkv(text, SHAPES[1], T, 1, kernels[i], max_pool, true);
                snprintf(text, sizeof text, "snapkv:lukv:window=1:kernel=%d:max_pool=%d", kernels[i], max_pool);
                compare_snapkv(text, SHAPES[4], T, 1, kernels[i], max_pool, false);
            }
}
END_TEST

// ---- KeyDiff ----

START_TEST(test_keydiff)
{
    for (int i = 0; i < N_SHAPES; i++)
        for (uint32_t T = 1; T <= 301; T += 50) {
            layer_view v = view_make(SHAPES[i], T, 1);
            shape s = SHAPES[i];
            float *want = case_alloc((size_t)s.G * T, sizeof *want);
            for (uint32_t g = 0; g < s.G; g++) {
                double anchor[64] = {0}, length = 0;
                for (uint32_t j = 0; j < T; j++)
                    for (uint32_t c = 0; c < s.d; c++)
                        anchor[c] += key_of(&v, g, j)[c] / sqrt(dot(key_of(&v, g, j), key_of(&v, g, j), s.d)) / T;
                for (uint32_t c = 0; c < s.d; c++) length += anchor[c] * anchor[c];
                for (uint32_t j = 0; j < T; j++) {
                    const float *k = key_of(&v, g, j);
                    double along = 0;
                    for (uint32_t c = 0; c < s.d; c++) along += anchor[c] * k[c];
                    want[(size_t)g * T + j] = (float)(-along / sqrt(length) / sqrt(dot(k, k, s.d)));
                }
            }
            compare("keydiff", &v, want, 1e-6);
            free(want);
            view_free(&v);
        }
}
END_TEST

// Ranks as -sum over i of cos(k_j, k_i), wherever two of those sums really differ.
START_TEST(test_keydiff_ranks_as_pairs_do)
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
END_TEST

START_TEST(test_keydiff_degenerate)
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
END_TEST

// ---- Expected Attention ----

typedef struct ea_case {
    const char *text;
    uint32_t future, sinks;
    double epsilon;
    bool covariance, value_norm, sinks_in_softmax;
} ea_case;

// Mean and covariance of one head's queries, each of them first turned by the mean rotation: the same as R mu and R C R^T.
static void naive_statistics(double *mean, double *covariance, const layer_view *v, uint32_t h, const ea_case *e)
{
    uint32_t T = v->n_tokens, d = v->head_dim, n = T - e->sinks;
    double *turned = case_alloc((size_t)T * d, sizeof *turned), *at = case_alloc(d, sizeof *at);
    double *r = case_alloc((size_t)d * d, sizeof *r);
    float *unit = case_alloc(d, sizeof *unit);
    for (uint32_t c = 0; c < d; c++) { // column c of R: the mean of where the unit vector c goes
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
    free(turned), free(at), free(r), free(unit);
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
    free(p), free(z), free(mean), free(covariance);
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
    free(want), free(got);
    view_free(&v);
}

START_TEST(test_expected_attention)
{
    static const ea_case cases[] = {
        {"ea", 512, 4, 0.02, true, true, false},
        {"ea:lukv", 512, 4, 0.02, true, true, true},
        {"ea:covariance=0", 512, 4, 0.02, false, true, false},
        {"ea:sinks=0:epsilon=0", 512, 0, 0, true, true, false},
        {"ea:value_norm=0:future=17", 17, 4, 0.02, true, false, false},
        {"ea:lukv:sinks=9:value_norm=0:covariance=0", 512, 9, 0.02, false, false, true},
        {"ea:future=1:epsilon=0", 1, 4, 0, true, true, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int k = 0; k < N_SHAPES; k++) {
            compare_ea(&cases[i], SHAPES[k], 90);
            compare_ea(&cases[i], SHAPES[k], cases[i].sinks + 1); // one query: no covariance
        }
    compare_ea(&cases[0], SHAPES[1], 1100); // over several chunks of the statistics
    compare_ea(&cases[1], SHAPES[1], 512 + 4);
}
END_TEST

// With one future position and no covariance, EA is the attention that the mean query pays at position T: exact RoPE, plain softmax.
START_TEST(test_expected_attention_of_the_mean_query)
{
    enum { T = 60 };
    shape s = SHAPES[4];
    layer_view v = view_make(s, T, 0.7);
    float *got = case_score("ea:lukv:future=1:covariance=0:value_norm=0:sinks=0", &v);
    for (uint32_t g = 0; g < s.G; g++) {
        double want[T] = {0}, z[T], query[64];
        for (uint32_t h = g * s.H / s.G; h < (g + 1) * s.H / s.G; h++) {
            float mean[64];
            for (uint32_t c = 0; c < s.d; c++) {
                double sum = 0;
                for (uint32_t i = 0; i < T; i++) sum += v.q_raw[((size_t)i * s.H + h) * s.d + c];
                mean[c] = (float)(sum / T);
            }
            rotate(query, mean, s.d, v.rope_frequency, T);
            for (uint32_t j = 0; j < T; j++) {
                z[j] = 0;
                for (uint32_t c = 0; c < s.d; c++) z[j] += query[c] * key_of(&v, g, j)[c] / sqrt(s.d);
            }
            softmax(z, T);
            for (uint32_t j = 0; j < T; j++) want[j] += z[j] * s.G / s.H;
        }
        double sum = 0;
        for (uint32_t j = 0; j < T; j++) {
            ck_assert_double_eq_tol(got[g * T + j], want[j], 1e-6);
            sum += got[g * T + j];
        }
        ck_assert_double_eq_tol(sum, 1, 1e-5);
    }
    free(got);
    view_free(&v);
}
END_TEST

START_TEST(test_short_contexts)
{
    static const struct {
        const char *text;
        uint32_t T;
        const char *numbers[2];
    } cases[] = {{"snapkv", 64, {"64 tokens", "window of 64"}},
                 {"snapkv:lukv", 1, {"1 tokens", "window of 32"}},
                 {"snapkv:window=7", 7, {"7 tokens", "window of 7"}},
                 {"ea", 4, {"4 tokens", "4 sinks"}},
                 {"ea:lukv", 3, {"3 tokens", "4 sinks"}},
                 {"ea:lukv:sinks=30", 29, {"29 tokens", "30 sinks"}}};
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
END_TEST

// ---- names ----

START_TEST(test_metric_names)
{
    static const struct {
        const char *text, *spec;
        uint32_t sink, window;
    } cases[] = {
        {"snapkv", "snapkv:kvpress", 4, 64},
        {"snapkv:kvpress", "snapkv:kvpress", 4, 64},
        {"snapkv:lukv", "snapkv:lukv", 4, 32},
        {"keydiff", "keydiff", 4, 1},
        {"ea", "ea:kvpress", 4, 1},
        {"ea:lukv", "ea:lukv", 4, 1},
        {"snapkv:window=32", "snapkv:kvpress:window=32", 4, 32},
        {"snapkv:kvpress:window=64:kernel=5", "snapkv:kvpress", 4, 64},
        {"snapkv:kernel=7:window=16:max_pool=1", "snapkv:kvpress:window=16:kernel=7:max_pool=1", 4, 16},
        {"snapkv:window=8:window=9", "snapkv:kvpress:window=9", 4, 9}, // the last one holds
        {"ea:epsilon=0", "ea:kvpress:epsilon=0", 4, 1},
        {"ea:epsilon=2e-2", "ea:kvpress", 4, 1},
        {"ea:lukv:epsilon=0.5:sinks=0", "ea:lukv:sinks=0:epsilon=0.5", 4, 1},
        {"ea:sinks_in_softmax=1", "ea:kvpress:sinks_in_softmax=1", 4, 1},
        {"keydiff:similarity=euclid:anchor=median", "keydiff:anchor=median:similarity=euclid", 4, 1},
        {"keydiff:anchor=mean", "keydiff", 4, 1},
        {"lagkv", "lagkv:kvpress", 4, 1},
        {"lagkv:paper:lag=128:mode=local:cross=1", "lagkv:paper:lag=128:mode=local:cross=1", 16, 1},
        {"h2o", "h2o", 4, 32},
        {"h2o:window=8", "h2o:window=8", 4, 8},
        {"h2o:kvpress", "h2o:kvpress", 4, 1},
        {"morphkv:fusion=max", "morphkv:fusion=max", 4, 32},
        {"critical+snapkv:window=16", "critical+snapkv:kvpress:window=16", 4, 16},
        {"critical:share=0+lagkv:paper", "critical:share=0+lagkv:paper", 16, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        metric m = case_metric(cases[i].text), again = case_metric(m.spec);
        ck_assert_str_eq(m.spec, cases[i].spec);
        ck_assert_str_eq(again.spec, m.spec);
        ck_assert_ptr_eq(again.kind, m.kind);
        for (int p = 0; p < SCORER_MAX_PARAMETERS; p++) ck_assert_double_eq(again.values[p], m.values[p]);
        ck_assert_uint_eq(metric_protect_sink(&m), cases[i].sink);
        ck_assert_uint_eq(metric_protect_window(&m), cases[i].window);
    }
    metric m = case_metric("ea:epsilon=0.125:future=64");
    ck_assert_double_eq(metric_value(&m, "epsilon"), 0.125);
    ck_assert_double_eq(metric_value(&m, "future"), 64);
    ck_assert_double_eq(metric_value(&m, "sinks"), 4);
}
END_TEST

START_TEST(test_metric_errors)
{
    static const char *const cases[][2] = {
        {"", "snapkv:kvpress, snapkv:lukv, snapkv:adakv, "},
        {"", "streaming:kvpress, random, critical+METRIC, with"},
        {"snap", "'snap' is unknown"},
        {"snapkvx", "unknown"},
        {"snapkv:other", "unknown"},
        {"keydiff:kvpress", "unknown"},
        {"Keydiff", "unknown"},
        {"knorm:", "parameters: none"},
        {"knorm:window=3", "'window=3' is not parameter=value; parameters: none"},
        {"snapkv:", "parameters: window, kernel, max_pool, group_first, group_max"},
        {"keydiff:anchor=mode", "anchor expects one of mean|raw|median (of the normalised keys"},
        {"keydiff:anchor=0", "found '0'"},
        {"keydiff:anchor=", "found ''"},
        {"keydiff+snapkv", "keydiff wraps no other metric"},
        {"critical", "write critical+METRIC"},
        {"critical+", "write critical+METRIC"},
        {"critical+snap", "'snap' is unknown"},
        {"critical+snapkv:window=0", "window expects an integer"},
        {"critical+snapkv:kernel=4", "kernel must be odd"},
        {"critical+h2o:half", "cannot be wrapped"},
        {"critical+critical+knorm", "unknown"},
        {"critical+ea", "add :value_norm=0"},
        {"critical:share=1.5+knorm", "share expects a number from 0 to 1"},
        {"rocketkv:kernel=62", "kernel must be odd"},
        {"snapkv::window=3", "is not parameter=value"},
        {"snapkv:lukv:windows=3", "'windows=3' is not parameter=value; parameters: window, kernel, max_pool"},
        {"snapkv:lukv:window", "'window' is not"},
        {"snapkv:window=", "window expects an integer from 1 to 65536"},
        {"snapkv:window=0", "found '0'"},
        {"snapkv:window=65537", "found '65537'"},
        {"snapkv:window=-1", "found '-1'"},
        {"snapkv:window=3.5", "found '3.5'"},
        {"snapkv:window=3x", "found '3x'"},
        {"snapkv:window=nan", "found 'nan'"},
        {"snapkv:kernel=4", "kernel must be odd"},
        {"snapkv:kernel=257", "from 1 to 255"},
        {"snapkv:max_pool=2", "from 0 to 1"},
        {"ea:epsilon=-0.1", "epsilon expects a number from 0"},
        {"ea:epsilon=inf", "found 'inf'"},
        {"ea:sinks=4097", "sinks expects an integer from 0 to 4096"},
        {"ea:kvpress:future=1000000:sinks=4096:epsilon=0.000123456789123456:covariance=0:value_norm=0:sinks_in_softmax="
         "1"
         "+knorm",
         "ea wraps no other metric"},
        {"critical:share=0.123456789012345:epsilon=0.000123456789123456+"
         "ea:future=1000000:sinks=4096:epsilon=0.000123456789123456:covariance=0:value_norm=0:sinks_in_softmax=1",
         "characters, at most 127 fit"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        metric m;
        help_fails(metric_parse(&m, cases[i][0], err), KVB_ARGUMENT, cases[i][1]);
    }
}
END_TEST

// Different numbers must never share a name, for the record keeps scores by name.
START_TEST(test_metric_names_tell_values_apart)
{
    static const char *const texts[] = {"ea:epsilon=0.02000000001", "ea:epsilon=0.1234567890123", "ea:epsilon=1e-300",
                                        "ea:epsilon=0.30000000000000004"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        metric m = case_metric(texts[i]), again = case_metric(m.spec);
        ck_assert_msg(metric_value(&m, "epsilon") == metric_value(&again, "epsilon"), "%s is written as %s", texts[i],
                      m.spec);
    }
}
END_TEST

START_TEST(test_metric_json)
{
    static const char *const cases[][2] = {
        {"snapkv", "{\"window\":64,\"kernel\":5,\"max_pool\":0,\"group_first\":0,\"group_max\":0,"
                   "\"protect_sink\":4,\"protect_window\":64}"},
        {"snapkv:lukv:window=8", "{\"window\":8,\"kernel\":7,\"max_pool\":1,\"group_first\":0,"
                                 "\"group_max\":0,\"protect_sink\":4,\"protect_window\":8}"},
        {"keydiff:anchor=raw", "{\"anchor\":\"raw\",\"similarity\":\"cos\",\"protect_sink\":4,\"protect_window\":1}"},
        {"knorm", "{\"protect_sink\":4,\"protect_window\":1}"},
        {"critical:share=0+tova",
         "{\"share\":0,\"epsilon\":0.0001,\"wraps\":\"tova\",\"parameters\":{\"scope\":\"layer\"},"
         "\"protect_sink\":4,\"protect_window\":1}"},
        {"ea:lukv:epsilon=0", "{\"future\":512,\"sinks\":4,\"epsilon\":0,\"covariance\":1,\"value_norm\":1,"
                              "\"sinks_in_softmax\":1,\"stored\":0,\"protect_sink\":4,\"protect_window\":1}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        metric m = case_metric(cases[i][0]);
        cJSON *o = metric_to_json(&m);
        char *text = cJSON_PrintUnformatted(o);
        ck_assert_str_eq(text, cases[i][1]);
        cJSON_free(text);
        cJSON_Delete(o);
    }
}
END_TEST

// The table itself: every scorer can be named, its defaults are in range, and its canonical name fits a record.
START_TEST(test_scorer_table)
{
    for (size_t i = 0; i < scorer_count; i++) {
        const scorer *s = scorer_list[i];
        char text[64];
        snprintf(text, sizeof text, "%s%s%s%s", s->name, *s->variant ? ":" : "", s->variant,
                 s->wraps ? "+snapkv:kvpress" : "");
        metric m = case_metric(text);
        ck_assert_ptr_eq(m.kind, s);
        ck_assert_str_eq(m.spec, text);
        ck_assert(s->score && *s->summary && *s->source && *s->formula);
        ck_assert(!s->why_not_nested == !s->rank);
        for (int p = 0; s->parameters[p].name; p++)
            ck_assert(s->parameters[p].low <= s->parameters[p].value &&
                      s->parameters[p].value <= s->parameters[p].high);
    }
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, test_snapkv);
    tcase_add_test(tc, test_snapkv_pooling);
    tcase_add_test(tc, test_keydiff);
    tcase_add_test(tc, test_keydiff_ranks_as_pairs_do);
    tcase_add_test(tc, test_keydiff_degenerate);
    tcase_add_test(tc, test_expected_attention);
    tcase_add_test(tc, test_expected_attention_of_the_mean_query);
    tcase_add_test(tc, test_short_contexts);
    tcase_add_test(tc, test_metric_names);
    tcase_add_test(tc, test_metric_errors);
    tcase_add_test(tc, test_metric_names_tell_values_apart);
    tcase_add_test(tc, test_metric_json);
    tcase_add_test(tc, test_scorer_table);
}

UNIT_MAIN("profiler scorer", fill)
