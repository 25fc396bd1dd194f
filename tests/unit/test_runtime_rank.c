// Learned rankings: files made byte by byte here, damaged ones among them, and scores against the formula in
// kvbudget.h.
#include "runtime/rank.h"
#include "unit.h"

enum { L = 2, G = 2, F = 2, P = 2 * F + 2, FOLDS = 1, N_WEIGHTS = (1 + FOLDS) * L * G * P };

#define HASH "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
// The name is Python's hashlib.sha256() of the text without it and of the weights.
#define NAME "learned:e00be92dad6e"
#define RANKING                                                                              \
    "{\\\"features\\\":[{\\\"metric\\\":\\\"keydiff\\\",\\\"log\\\":false},{\\\"metric\\\":" \
    "\\\"snapkv:kvpress\\\",\\\"log\\\":true}],\\\"sink\\\":2,\\\"folds\\\":[[\\\"" HASH     \
    "\\\"]],\\\"name\\\":\\\"" NAME "\\\"}"

static unsigned char bytes[8192];

static double weight(size_t i)
{
    return 0.25 * (double)((i * 7) % 11) - 1;
}

// Makes a file in `bytes`, with the first `from` in its header replaced by `to` unless NULL. Returns the file's size.
static size_t make(const char *from, const char *to)
{
    char header[2048], more[2048];
    snprintf(header, sizeof header,
             "{\"__metadata__\":{\"format\":\"kvbudget-rank\",\"format_version\":\"1\",\"model_sha256\":\"\","
             "\"ranking\":\"" RANKING "\"},\"rank_weights\":{\"dtype\":\"F64\",\"shape\":[%d,%d,%d,%d],"
             "\"data_offsets\":[0,%d]}}",
             1 + FOLDS, L, G, P, N_WEIGHTS * 8);
    char *at = from ? strstr(header, from) : NULL;
    ck_assert(!from || at);
    if (at) {
        snprintf(more, sizeof more, "%s", at + strlen(from));
        snprintf(at, sizeof header - (size_t)(at - header), "%s%s", to, more);
    }
    size_t n = strlen(header);
    memset(bytes, 0, 8);
    bytes[0] = (unsigned char)n;
    bytes[1] = (unsigned char)(n >> 8);
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < N_WEIGHTS; i++) {
        double value = weight(i);
        memcpy(bytes + 8 + n + 8 * i, &value, 8); // the tests run on little-endian machines
    }
    return 8 + n + N_WEIGHTS * 8;
}

static kvb_ranking *open_made(void)
{
    kvb_ranking *r = NULL;
    size_t size = make(NULL, NULL);
    help_ok(kvb_ranking_open_memory(&r, bytes, size, "case", err));
    return r;
}

// The same reader serves a ranking's own file and a table that carries the ranking: both are parsed first.
UNIT_TEST(read_from_a_parsed_file)
{
    kvb_error err = {0};
    kvb_safetensors file;
    kvb_ranking *r = NULL;
    size_t size = make(NULL, NULL);
    ck_assert_int_eq(kvb_safetensors_parse(&file, bytes, size, "parsed", &err), KVB_OK);
    ck_assert_int_eq(kvb_ranking_read(&r, &file, &err), KVB_OK);
    ck_assert_str_eq(kvb_ranking_about(r)->metrics[1], "snapkv:kvpress");
    kvb_ranking_close(r);
    kvb_safetensors_free(&file);

    size = make("rank_weights", "other_weights");
    ck_assert_int_eq(kvb_safetensors_parse(&file, bytes, size, "parsed", &err), KVB_OK);
    ck_assert_int_ne(kvb_ranking_read(&r, &file, &err), KVB_OK);
    ck_assert(!r && strstr(err.message, "parsed: ") && strstr(err.message, "rank_weights"));
    kvb_safetensors_free(&file);
}

UNIT_TEST(what_the_file_says)
{
    kvb_ranking *r = open_made();
    const kvb_ranking_info *info = kvb_ranking_about(r);
    ck_assert(info->n_layers == L && info->n_kv_heads == G && info->n_features == F && info->n_columns == P);
    unit_strings(info->name, NAME, info->metrics[1], "snapkv:kvpress");
    ck_assert(info->logarithm[0] == 0 && info->logarithm[1] == 1 && info->sink == 2 && info->weights[P] == weight(P));
    unit_numbers(kvb_ranking_fold(r, HASH), 1, kvb_ranking_fold(r, "f" HASH), 0);
    ck_assert(!kvb_ranking_about(NULL) && !kvb_table_ranking(NULL));
    kvb_ranking_close(r);
    kvb_ranking_close(NULL);
}

UNIT_TEST(damaged_files)
{
    static const struct {
        const char *from, *to, *says;
        kvb_status status;
    } cases[] = {
        {"kvbudget-rank", "kvbudget-roll", "expected a ranking", KVB_FORMAT},
        {"\"ranking\"", "\"rankink\"", "without a ranking", KVB_FORMAT},
        {"version\":\"1\"", "version\":\"2\"", "newer kvbudget", KVB_VERSION},
        {"learned:e00b", "learned:", "12 digits", KVB_FORMAT},
        {"learned:e00b", "learned:XYZW", "12 digits", KVB_FORMAT},
        {"learned:e00b", "learned:fade", "hashes to " NAME, KVB_FORMAT},
        {"\\\"log\\\":true", "\\\"log\\\":false", "but its content hashes to", KVB_FORMAT},
        {"]],\\\"name\\\"", "]],\\\"more\\\":1, \\\"name\\\"", "but its content hashes to", KVB_FORMAT},
        {"\\\"log\\\":true", "\\\"log\\\":1", "feature 1", KVB_FORMAT},
        {"\\\"features\\\"", "\\\"futures\\\"", "1 to 16 features", KVB_FORMAT},
        {"\\\"sink\\\":2", "\\\"sink\\\":2.5", "sink", KVB_FORMAT},
        {"\\\"sink\\\":2", "\\\"sink\\\":-1", "sink", KVB_FORMAT},
        {"[[\\\"0011", "[[\\\"00", "folds", KVB_FORMAT},
        {"[[\\\"0011", "[[\\\"0Z11", "folds", KVB_FORMAT},
        {"rank_weights", "rank_wEights", "rank_weights", KVB_FORMAT},
        {"\\\"sink\\\":2", "\\\"sink\\\":2,\\\"layer_mean\\\":1", "layer_mean: expected true", KVB_FORMAT},
        {"\\\"sink\\\":2", "\\\"sink\\\":2,\\\"layer_mean\\\":true", "F64 [2, layers, heads, 8]", KVB_FORMAT},
        {"\\\"sink\\\":2", "\\\"sink\\\":2,\\\"frozen\\\":0", "frozen: expected true", KVB_FORMAT},
        {"\\\"sink\\\":2", "\\\"sink\\\":2,\\\"frozen\\\":true", "F64 [2, layers, heads, 10]", KVB_FORMAT},
        {"[2,2,2,6]", "[1,4,2,6]", "F64 [2, layers, heads, 6]", KVB_FORMAT},
        {"[2,2,2,6]", "[2,2,1,12]", "F64 [2, layers, heads, 6]", KVB_FORMAT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvb_error err = {0};
        kvb_ranking *r = (kvb_ranking *)bytes;
        size_t size = make(cases[i].from, cases[i].to);
        kvb_status status = kvb_ranking_open_memory(&r, bytes, size, "case", &err);
        ck_assert_msg(status == cases[i].status && !r, "%s: %s", cases[i].to, kvb_status_name(status));
        ck_assert_msg(strstr(err.message, cases[i].says) && strstr(err.message, "case"), "%s", err.message);
    }
    kvb_error err = {0};
    kvb_ranking *r;
    size_t size = make(NULL, NULL);
    memset(bytes + size - 8, 0xff, 8); // NaN
    unit_refuses(kvb_ranking_open_memory(&r, bytes, size, "case", &err), KVB_NUMERIC, "not finite");
    size = make(NULL, NULL);
    bytes[size - 9] ^= 1; // another weight
    unit_refuses(kvb_ranking_open_memory(&r, bytes, size, "case", &err), KVB_FORMAT, "is called " NAME);
    ck_assert_int_eq(kvb_ranking_open_memory(&r, bytes, size - 1, "case", &err), KVB_FORMAT);
    ck_assert_int_eq(kvb_ranking_open(&r, "/no/such/file", &err), KVB_IO);
    ck_assert_int_eq(kvb_ranking_open(NULL, "x", &err), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_ranking_open_memory(&r, NULL, 1, NULL, &err), KVB_ARGUMENT);
}

// Computes the formula of kvbudget.h directly.
static double expected(const double *w, const float *const *features, const int *logarithm, uint32_t sink, uint32_t T,
                       uint32_t j)
{
    double sum = w[2 * F + 1] - w[2 * F] * log(T - j);
    for (int f = 0; f < F; f++) {
        double x[64], mean = 0, square = 0;
        for (uint32_t i = 0; i < T; i++)
            x[i] = logarithm[f] ? log(fmax((double)features[f][i], 1e-12)) : (double)features[f][i];
        for (uint32_t i = sink; i < T; i++) mean += x[i] / (T - sink);
        for (uint32_t i = sink; i < T; i++) square += (x[i] - mean) * (x[i] - mean) / (T - sink);
        double z = j < sink || square < 1e-20 ? 0 : (x[j] - mean) / sqrt(square);
        sum += w[2 * f] * z + w[2 * f + 1] * z * fabs(z);
    }
    return sum;
}

UNIT_TEST(scores_are_the_formula)
{
    enum { T = 40 };
    kvb_ranking *r = open_made();
    float a[T], b[T], out[T];
    const float *features[F] = {a, b};
    for (uint32_t j = 0; j < T; j++) {
        a[j] = 1000 + sinf((float)j); // the squares of a large offset would cancel
        b[j] = j % 7 ? expf(-(float)(j % 13)) : 0;
    }
    for (uint32_t fold = 0; fold <= FOLDS; fold++)
        for (size_t head = 0; head < L * G; head++) {
            help_ok(kvb_rank_heads(r, fold, head, 1, features, T, out, err));
            const double *w = r->weights + (fold * L * G + head) * P;
            for (uint32_t j = 0; j < T; j++)
                ck_assert_double_eq_tol(out[j], expected(w, features, r->logarithm, 2, T, j), 2e-5);
        }
    for (uint32_t j = 0; j < T; j++) a[j] = 3; // a feature that does not vary says nothing
    ck_assert_int_eq(kvb_rank_heads(r, 0, 1, 1, features, T, out, NULL), KVB_OK);
    ck_assert_double_eq_tol(out[20], expected(r->weights + P, features, r->logarithm, 2, T, 20), 2e-5);
    ck_assert_int_eq(kvb_rank_heads(r, 0, 1, 1, features, 2, out, NULL), KVB_OK); // sinks alone
    ck_assert_double_eq_tol(out[1], r->weights[P + 5] - 0 * r->weights[P + 4], 1e-6);
    kvb_ranking_close(r);
}

// With layer_mean: the heads' own terms as before, and for each feature the mean of z over the layer's heads.
UNIT_TEST(layers_are_ranked_together)
{
    enum { T = 30, N = 3 };
    double w[2 * N * (P + F)];
    kvb_ranking r = {.info = {.name = "case", .n_layers = 2, .n_kv_heads = N, .n_features = F, .sink = 2},
                     .weights = w};
    float a[N * T], b[N * T], out[N * T], own[N * T], alone[T];
    const float *features[F] = {a, b};
    r.logarithm[1] = 1;
    for (size_t i = 0; i < sizeof w / sizeof *w; i++) w[i] = weight(i);
    for (uint32_t i = 0; i < N * T; i++) {
        a[i] = sinf((float)(i * i));
        b[i] = expf(cosf((float)i));
    }
    r.info.n_columns = P; // without layer_mean, every head is ranked alone
    help_ok(kvb_rank_heads(&r, 0, N, N, features, T, own, err));
    for (uint32_t g = 0; g < N; g++) {
        const float *of_head[F] = {a + g * T, b + g * T};
        help_ok(kvb_rank_heads(&r, 0, N + g, 1, of_head, T, alone, err));
        ck_assert(memcmp(own + g * T, alone, sizeof alone) == 0);
    }
    r.info.n_columns = P + F, r.info.layer_mean = 1;
    help_ok(kvb_rank_heads(&r, 0, N, N, features, T, out, err));
    for (uint32_t g = 0; g < N; g++) {
        const double *of = w + (N + g) * (P + F);
        double plain[P], one[P] = {0};
        memcpy(plain, of, 2 * F * sizeof *of);
        memcpy(plain + 2 * F, of + 3 * F, 2 * sizeof *of);
        for (uint32_t j = 0; j < T; j++) {
            const float *of_head[F] = {a + g * T, b + g * T};
            double want = expected(plain, of_head, r.logarithm, 2, T, j);
            for (uint32_t f = 0; f < F; f++) {
                one[2 * f] = of[2 * F + f] / N; // what the mean adds, head by head
                for (uint32_t i = 0; i < N; i++) {
                    const float *of_other[F] = {a + i * T, b + i * T};
                    want += expected(one, of_other, r.logarithm, 2, T, j);
                }
                one[2 * f] = 0;
            }
            ck_assert_double_eq_tol(out[g * T + j], want, 2e-5);
        }
    }
    b[2 * T + 7] = NAN;
    help_fails(kvb_rank_heads(&r, 0, N, N, features, T, out, err), KVB_NUMERIC, "case: feature 1, head 2, token 7");
}

// If frozen, mean and deviation are the file's: a token's score stays when others are evicted, but for recency.
UNIT_TEST(frozen_scores_stay)
{
    enum { T = 30 };
    double w[P + 2 * F] = {0.5, 0.25, -1, 0.125, 2, 0.5, -3, 2, 0, 0.75}; // recency weighs nothing
    kvb_ranking r = {.info = {.n_columns = P + 2 * F, .n_kv_heads = 1, .n_features = F, .sink = 2, .frozen = 1},
                     .logarithm = {0, 1},
                     .weights = w};
    float all[F][T], left[F][T], out[T], after[T];
    const float *features[F] = {all[0], all[1]}, *cut[F] = {left[0], left[1]};
    uint32_t n = 0;
    for (uint32_t j = 0; j < T; j++) all[0][j] = sinf((float)(j * j)), all[1][j] = expf(cosf((float)j));
    help_ok(kvb_rank_heads(&r, 0, 0, 1, features, T, out, err));
    for (uint32_t j = 2; j < T; j++) {
        double z = (all[0][j] - 2) * 0.5, y = (log(all[1][j]) + 3) * 2;
        ck_assert_double_eq_tol(out[j], 0.5 * z + 0.25 * z * fabs(z) - y + 0.125 * y * fabs(y) + 0.75, 2e-5);
    }
    for (uint32_t j = 0; j < T; j++)
        if (j % 3 != 2) left[0][n] = all[0][j], left[1][n] = all[1][j], out[n++] = out[j];
    help_ok(kvb_rank_heads(&r, 0, 0, 1, cut, n, after, err));
    ck_assert(n == 20 && memcmp(out, after, n * sizeof *out) == 0);
}

UNIT_TEST(values_and_moments)
{
    const float x[5] = {100, 1, 3, 5, 7};
    double mean, scale;
    kvb_rank_moments(x, 0, 1, 5, &mean, &scale);
    ck_assert_double_eq_tol(mean, 4, 1e-12);
    ck_assert_double_eq_tol(scale, 1 / sqrt(5), 1e-12);
    kvb_rank_moments(x, 0, 5, 5, &mean, &scale);
    ck_assert(mean == 0 && scale == 0);
    ck_assert_double_eq_tol(kvb_rank_value(0, 1), log(1e-12), 1e-9);
    ck_assert_double_eq(kvb_rank_value(-2, 0), -2);
    const float damaged[3] = {1, 2, INFINITY};
    unit_numbers(kvb_rank_finite(x, 5), 5, kvb_rank_finite(damaged, 3), 2);
}

UNIT_MAIN("runtime_rank")
