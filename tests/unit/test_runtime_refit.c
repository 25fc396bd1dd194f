// Refitting a head against plain sums in double: what was chosen, which error is left, and that no input makes it NaN.
#include "test_runtime_cases.h"

enum { MAX_D = 72 };

typedef struct head_case {
    kvb_refit_head h;
    float *k, *v, *q, *new_k, *new_v, *bias;
    uint32_t *positions;
    void *work;
    size_t bytes;
    kvb_refit_result out;
    kvb_error err;
} head_case;

static void *case_alloc(size_t n, size_t size)
{
    void *p = calloc(n + 1, size);
    ck_assert_ptr_nonnull(p);
    return p;
}

static float noise(uint64_t *random)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)(case_random(random) % 10001) / 10000 - 0.5f;
    return sum * 1.7f;
}

static head_case open_case(uint32_t T, uint32_t d, uint32_t t, uint32_t n, uint64_t *random)
{
    head_case c = {.h = {.n_tokens = T, .head_dim = d, .n_kept = t, .n_queries = n}};
    size_t rows = T;
    c.k = case_alloc(rows * d, sizeof(float)), c.v = case_alloc(rows * d, sizeof(float));
    c.q = case_alloc((size_t)n * d + 1, sizeof(float));
    c.new_k = case_alloc((size_t)t * d, sizeof(float));
    c.new_v = case_alloc((size_t)t * d, sizeof(float)), c.bias = case_alloc(t, sizeof(float));
    c.positions = case_alloc(t, sizeof *c.positions);
    for (size_t i = 0; i < rows * d; i++)
        c.k[i] = noise(random) + (i % d == 0), c.v[i] = noise(random) + (float)(i / d) / (float)T;
    for (size_t i = 0; i < (size_t)n * d; i++) c.q[i] = (noise(random) + (i % d == 0)) * 1.5f / sqrtf((float)d);
    for (uint32_t j = 0; j < t; j++) c.positions[j] = (uint32_t)((uint64_t)j * T / t);
    c.h.k = c.k, c.h.v = c.v, c.h.queries = c.q, c.h.positions = c.positions;
    ck_assert_int_eq(kvb_refit_bytes(&c.h, &c.bytes, &c.err), KVB_OK);
    c.work = case_alloc(c.bytes + 1, 1);
    return c;
}

static kvb_status refit_case(head_case *c, bool explicit_bias)
{
    return kvb_refit(&c->h, (char *)c->work + 1, c->bytes, c->new_k, c->new_v, explicit_bias ? c->bias : NULL, &c->out,
                     &c->err);
}

static void close_case(head_case *c)
{
    void *all[] = {c->k, c->v, c->q, c->new_k, c->new_v, c->bias, c->positions, c->work};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// Computes x = A^-1 B by elimination, A [n,n], B [n,d]. Both are overwritten, B with x.
static void eliminate(double *a, double *b, size_t n, size_t d)
{
    for (size_t k = 0; k < n; k++)
        for (size_t i = 0; i < n; i++) {
            if (i == k) continue;
            double by = a[i * n + k] / a[k * n + k];
            for (size_t j = k; j < n; j++) a[i * n + j] -= by * a[k * n + j];
            for (size_t j = 0; j < d; j++) b[i * d + j] -= by * b[k * d + j];
        }
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < d; j++) b[i * d + j] /= a[i * n + i];
}

// Of every 64 queries the last 16 are left out, or of fewer the last of four equal blocks.
static bool left_out(const head_case *c, size_t i)
{
    size_t n = c->h.n_queries, block = n < 64 ? n / 4 : 16;
    return i / block % 4 == 3;
}

static double score_row(const float *q, const float *k, size_t d)
{
    double sum = 0;
    for (size_t c = 0; c < d; c++) sum += (double)q[c] * k[c];
    return sum;
}

// Computes softmax(q.K + bias) V of one query over t rows; p [t] receives the weights.
static void attend_row(const float *q, const float *k, const float *v, const float *bias, size_t t, size_t d, double *p,
                       double *o)
{
    double top = -INFINITY, mass = 0;
    for (size_t j = 0; j < t; j++) {
        p[j] = (bias ? bias[j] : 0) + score_row(q, k + j * d, d);
        top = fmax(top, p[j]);
    }
    for (size_t j = 0; j < t; j++) mass += p[j] = exp(p[j] - top);
    for (size_t c = 0; c < d; c++) o[c] = 0;
    for (size_t j = 0; j < t; j++) {
        p[j] /= mass;
        for (size_t c = 0; c < d; c++) o[c] += p[j] * v[j * d + c];
    }
}

// Returns the mean squared error over the left-out queries, in the unit of the library's errors.
static double judge(const head_case *c, const float *k, const float *v, const float *bias)
{
    size_t d = c->h.head_dim, n = c->h.n_queries, T = c->h.n_tokens;
    double *p = case_alloc(T, sizeof *p), *all = case_alloc(n * d, sizeof *all), got[MAX_D], sum = 0, variance = 0;
    size_t judged = 0;
    for (size_t i = 0; i < n; i++) {
        attend_row(c->q + i * d, c->k, c->v, NULL, T, d, p, all + i * d);
        if (!left_out(c, i)) continue;
        attend_row(c->q + i * d, k, v, bias, c->h.n_kept, d, p, got);
        for (size_t x = 0; x < d; x++) sum += (got[x] - all[i * d + x]) * (got[x] - all[i * d + x]);
        judged++;
    }
    for (size_t x = 0; x < d; x++) {
        double mean = 0;
        for (size_t i = 0; i < n; i++) mean += all[i * d + x] / (double)n;
        for (size_t i = 0; i < n; i++) variance += pow(all[i * d + x] - mean, 2) / (double)(n * d);
    }
    free(p);
    free(all);
    return sum / (double)(judged * d) / variance;
}

// Returns the kept rows of an array, which the caller frees.
static float *gather(const head_case *c, const float *from)
{
    size_t d = c->h.head_dim;
    float *to = case_alloc(c->h.n_kept * d, sizeof *to);
    for (uint32_t j = 0; j < c->h.n_kept; j++) memcpy(to + j * d, from + c->positions[j] * d, d * sizeof *to);
    return to;
}

// Divides the tokens that are not kept, and those of the n slots with the least attention, among n summaries: belongs
// [T] receives a token's, or n if it stays; slots [n] the slots. gram [d,d] measures distances.
static void divide(const head_case *c, size_t n, const double *gram, const double *mean, const double *most,
                   size_t *belongs, size_t *slots)
{
    size_t T = c->h.n_tokens, d = c->h.head_dim, t = c->h.n_kept;
    double *nearest = case_alloc(T, sizeof *nearest);
    for (size_t i = 0; i < T; i++) nearest[i] = INFINITY;
    for (size_t j = 0; j < t; j++) belongs[c->positions[j]] = n;
    for (size_t s = 0; s < n; s++) {
        size_t least = t;
        for (size_t j = 0; j < t; j++)
            if (belongs[c->positions[j]] == n && (least == t || most[c->positions[j]] < most[c->positions[least]]))
                least = j;
        belongs[c->positions[slots[s] = least]] = 0;
    }
    for (size_t s = 0; s < n; s++) {
        size_t centre = T;
        for (size_t i = 0; i < T; i++)
            if (belongs[i] < n &&
                (centre == T || (s ? nearest[i] * mean[i] > nearest[centre] * mean[centre] : mean[i] > mean[centre])))
                centre = i;
        for (size_t i = 0; i < T; i++) {
            double to = 0;
            for (size_t x = 0; x < d * d; x++)
                to += gram[x] * (c->k[i * d + x / d] - c->k[centre * d + x / d]) *
                      (c->k[i * d + x % d] - c->k[centre * d + x % d]);
            if (belongs[i] < n && to < nearest[i]) nearest[i] = to, belongs[i] = s;
        }
    }
    free(nearest);
}

// Puts n summaries, as kvbudget.h defines them, into the kept rows k, v [t, d], by plain sums.
static void summarise(const head_case *c, size_t n, float *k, float *v)
{
    size_t T = c->h.n_tokens, d = c->h.head_dim, N = c->h.n_queries, *belongs = case_alloc(T, sizeof *belongs),
           *slots = case_alloc(n, sizeof *slots);
    double *p = case_alloc(N * T, sizeof *p), *mean = case_alloc(T, sizeof *mean), *most = case_alloc(T, sizeof *most),
           *gram = case_alloc(d * d, sizeof *gram), *right = case_alloc(d * n, sizeof *right), o[MAX_D], trace = 0;
    for (size_t i = 0; i < N; i++) {
        attend_row(c->q + i * d, c->k, c->v, NULL, T, d, p + i * T, o);
        if (left_out(c, i)) continue;
        for (size_t j = 0; j < T; j++) mean[j] += p[i * T + j], most[j] = fmax(most[j], p[i * T + j]);
        for (size_t x = 0; x < d * d; x++) gram[x] += (double)c->q[i * d + x / d] * c->q[i * d + x % d];
    }
    for (size_t x = 0; x < d; x++) trace += gram[x * d + x];
    for (size_t x = 0; x < d; x++) gram[x * d + x] += 0.01 * trace / (double)d;
    divide(c, n, gram, mean, most, belongs, slots);
    for (size_t s = 0; s < n; s++) {
        double sum = 0;
        float *key = k + slots[s] * d, *value = v + slots[s] * d;
        memset(key, 0, d * sizeof *key), memset(value, 0, d * sizeof *value);
        for (size_t j = 0; j < T; j++) sum += belongs[j] == s ? mean[j] : 0;
        for (size_t x = 0; x < T * d; x++)
            if (belongs[x / d] == s)
                key[x % d] += (float)(mean[x / d] / sum) * c->k[x],
                    value[x % d] += (float)(mean[x / d] / sum) * c->v[x];
        for (size_t i = 0; i < N; i++) {
            const float *q = c->q + i * d;
            double part = 0, whole;
            if (left_out(c, i)) continue;
            for (size_t j = 0; j < T; j++) part += belongs[j] == s ? p[i * T + j] : 0;
            whole = log(part) - score_row(q, key, d) + score_row(q, c->k, d) - log(p[i * T]); // p[0] = e^score / mass
            for (size_t x = 0; x < d; x++) right[x * n + s] += q[x] * whole;
        }
    }
    eliminate(gram, right, d, n);
    for (size_t x = 0; x < d * n; x++) k[slots[x % n] * d + x / n] += (float)right[x];
    free(belongs), free(slots), free(p), free(mean), free(most), free(gram), free(right);
}

// Returns V + (P'P + 0.03 mean I)^-1 P'(O - P V), with P of the given keys and bias, where no value moves by more than
// half of its length. The caller frees it.
static float *ridge(const head_case *c, const float *k, const float *from, const float *bias)
{
    size_t d = c->h.head_dim, n = c->h.n_queries, t = c->h.n_kept;
    float *v = case_alloc(t * d, sizeof *v);
    memcpy(v, from, t * d * sizeof *v);
    double *p = case_alloc(c->h.n_tokens, sizeof *p), *a = case_alloc(t * t, sizeof *a),
           *b = case_alloc(t * d, sizeof *b), full[MAX_D], kept[MAX_D], trace = 0;
    for (size_t i = 0; i < n; i++) {
        if (left_out(c, i)) continue;
        attend_row(c->q + i * d, c->k, c->v, NULL, c->h.n_tokens, d, p, full);
        attend_row(c->q + i * d, k, v, bias, t, d, p, kept);
        for (size_t j = 0; j < t; j++) {
            for (size_t l = 0; l < t; l++) a[j * t + l] += p[j] * p[l];
            for (size_t x = 0; x < d; x++) b[j * d + x] += p[j] * (full[x] - kept[x]);
        }
    }
    for (size_t j = 0; j < t; j++) trace += a[j * t + j];
    for (size_t j = 0; j < t; j++) a[j * t + j] += 0.03 * trace / (double)t;
    eliminate(a, b, t, d);
    for (size_t j = 0; j < t; j++) {
        double own = 0, moved = 0;
        for (size_t i = j * d; i < j * d + d; i++) own += v[i] * v[i], moved += b[i] * b[i];
        for (size_t i = j * d; i < j * d + d; i++) v[i] += (float)(b[i] * fmin(1, sqrt(own / moved) / 2));
    }
    free(p), free(a), free(b);
    return v;
}

// Returns |A w - 1|^2 over the rows of A [n,t]; `off` [n] receives A w - 1.
static double mass_error(const double *a, size_t n, size_t t, const double *w, double *off)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        off[i] = -1;
        for (size_t j = 0; j < t; j++) off[i] += a[i * t + j] * w[j];
        sum += off[i] * off[i];
    }
    return sum;
}

// The library's bias balances the masses as well as coordinate descent in double does, both limited to [-3, 3].
static void check_bias(const head_case *c, const float *k)
{
    size_t d = c->h.head_dim, T = c->h.n_tokens, t = c->h.n_kept, n = 0;
    double *a = case_alloc(c->h.n_queries * t, sizeof *a), *w = case_alloc(t, sizeof *w),
           *off = case_alloc(c->h.n_queries, sizeof *off);
    for (size_t i = 0; i < c->h.n_queries; i++) {
        if (left_out(c, i)) continue;
        double mass = 0;
        for (size_t j = 0; j < T; j++) mass += exp(score_row(c->q + i * d, c->k + j * d, d));
        for (size_t j = 0; j < t; j++) a[n * t + j] = exp(score_row(c->q + i * d, k + j * d, d)) / mass;
        n++;
    }
    for (size_t j = 0; j < t; j++) w[j] = 1;
    double ones = mass_error(a, n, t, w, off);
    for (int sweep = 0; sweep < 500; sweep++)
        for (size_t j = 0; j < t; j++) {
            double g = 0, square = 1e-300, old = w[j];
            for (size_t i = 0; i < n; i++) g += a[i * t + j] * off[i], square += a[i * t + j] * a[i * t + j];
            w[j] = fmax(old - g / square, 1e-6);
            for (size_t i = 0; i < n; i++) off[i] += a[i * t + j] * (w[j] - old);
        }
    for (size_t j = 0; j < t; j++) w[j] = fmin(fmax(w[j], exp(-3)), exp(3));
    double best = mass_error(a, n, t, w, off);
    for (size_t j = 0; j < t; j++) w[j] = exp((double)c->bias[j]);
    ck_assert_double_le(mass_error(a, n, t, w, off), best + 0.05 * ones);
    free(a), free(w), free(off);
}

// Replaces the kept rows k, v by the best start, with summaries in 3/4, 3/8 or 3/16 of the slots, or none.
// Returns how many summaries that has.
static size_t best_start(const head_case *c, float *k, float *v)
{
    size_t best = 0, bytes = (size_t)c->h.n_kept * c->h.head_dim * sizeof *k;
    double least = judge(c, k, v, NULL);
    for (size_t n = c->h.n_kept * 3 / 4, tried = 0; tried < 3 && n > 0; tried++, n /= 2) {
        float *new_k = gather(c, c->k), *new_v = gather(c, c->v);
        summarise(c, n, new_k, new_v);
        double error = judge(c, new_k, new_v, NULL);
        if (error < least) least = error, best = n, memcpy(k, new_k, bytes), memcpy(v, new_v, bytes);
        free(new_k), free(new_v);
    }
    return best;
}

static void check_case(head_case *c)
{
    float *k = gather(c, c->k), *v = gather(c, c->v);
    double bare = judge(c, k, v, NULL), start;
    size_t n = best_start(c, k, v);
    start = judge(c, k, v, NULL);
    for (int explicit_bias = 0; explicit_bias < 2; explicit_bias++) {
        ck_assert_int_eq(refit_case(c, explicit_bias), KVB_OK);
        ck_assert(c->out.judged && c->out.error_after <= c->out.error_before);
        ck_assert_double_eq_tol(c->out.error_before / bare, 1, 2e-3);
        const float *bias = explicit_bias ? c->bias : NULL;
        bool shifted = c->out.changed & KVB_REFIT_KEYS;
        ck_assert_int_eq(n > 0, (c->out.changed & KVB_REFIT_SUMMARIES) != 0);
        double given = judge(c, c->new_k, c->new_v, bias);
        ck_assert_double_eq_tol(c->out.error_after / given, 1, 5e-3);
        for (size_t i = 0; (explicit_bias || !shifted) && i < c->h.n_kept * c->h.head_dim; i++)
            ck_assert_double_eq_tol(c->new_k[i], k[i], 2e-3);
        if (shifted) ck_assert_double_lt(judge(c, c->new_k, v, bias), start);
        float *moved = ridge(c, shifted ? c->new_k : k, v, shifted ? bias : NULL);
        double change = judge(c, shifted ? c->new_k : k, moved, shifted ? bias : NULL),
               still = judge(c, c->new_k, v, bias);
        ck_assert_int_eq(change < still, (c->out.changed & KVB_REFIT_VALUES) != 0);
        for (size_t i = 0; i < c->h.n_kept * c->h.head_dim; i++)
            ck_assert_double_eq_tol(c->new_v[i], change < still ? moved[i] : v[i], 2e-3);
        free(moved);
        if (explicit_bias && shifted) check_bias(c, k);
    }
    free(k);
    free(v);
}

UNIT_TEST(test_against_plain_sums)
{
    static const uint32_t SHAPES[][4] = {{300, 64, 40, 128}, {300, 64, 7, 128},    {257, 33, 70, 61},
                                         {97, 72, 48, 200},  {128, 16, 7, 32},     {64, 8, 3, 17},
                                         {500, 64, 120, 90}, {1100, 16, 300, 256}, {200, 72, 90, 12}};
    uint64_t random = 12;
    unsigned changed = 0;
    for (size_t s = 0; s < sizeof SHAPES / sizeof *SHAPES; s++) {
        head_case c = open_case(SHAPES[s][0], SHAPES[s][1], SHAPES[s][2], SHAPES[s][3], &random);
        size_t d = c.h.head_dim, rows = c.h.n_kept;
        for (size_t i = 0; s < 2 && i < c.h.n_tokens; i++) { // each evicted token has a twin among the first
            if (i < rows) c.positions[i] = (uint32_t)i;
            else
                memcpy(c.k + i * d, c.k + i % (rows * 3 / 8 + 1) * d, d * sizeof *c.k),
                    memcpy(c.v + i * d, c.v + i % (rows * 3 / 8 + 1) * d, d * sizeof *c.v);
        }
        for (size_t i = 0; s > 4 && s < 7 && i < (size_t)c.h.n_queries * d; i++)
            c.q[i] *= 3; // far from what a mean key has
        check_case(&c);
        changed |= (unsigned)c.out.changed;
        close_case(&c);
    }
    ck_assert_uint_eq(changed, KVB_REFIT_KEYS | KVB_REFIT_VALUES | KVB_REFIT_SUMMARIES);
}

static bool is_bare(const head_case *c)
{
    float *k = gather(c, c->k), *v = gather(c, c->v);
    size_t bytes = (size_t)c->h.n_kept * c->h.head_dim * sizeof(float);
    bool same = memcmp(k, c->new_k, bytes) == 0 && memcmp(v, c->new_v, bytes) == 0;
    free(k);
    free(v);
    return same && c->out.changed == 0;
}

UNIT_TEST(test_degenerate_heads)
{
    // T, d, t, n that must be left bare: one token, all kept, more than half kept, no queries, too few
    static const uint32_t BARE[][4] = {{1, 8, 1, 16}, {9, 8, 9, 16}, {20, 8, 11, 64}, {20, 8, 3, 0}, {20, 8, 3, 3}};
    uint64_t random = 5;
    for (size_t s = 0; s < sizeof BARE / sizeof *BARE; s++) {
        head_case c = open_case(BARE[s][0], BARE[s][1], BARE[s][2], BARE[s][3], &random);
        ck_assert_int_eq(refit_case(&c, false), KVB_OK);
        ck_assert(is_bare(&c) && !c.out.judged);
        close_case(&c);
    }
    for (uint32_t t = 1; t < 20; t += 6) { // equal queries, then equal keys
        head_case c = open_case(40, 8, t, 24, &random);
        for (uint32_t i = 8; i < 24 * 8; i++) c.q[i] = c.q[i % 8];
        ck_assert_int_eq(refit_case(&c, false), KVB_OK);
        for (uint32_t i = 8; i < 40 * 8; i++) c.k[i] = c.k[i % 8];
        ck_assert_int_eq(refit_case(&c, true), KVB_OK);
        for (uint32_t i = 0; i < t * 8; i++) ck_assert(isfinite(c.new_k[i]) && isfinite(c.new_v[i]));
        close_case(&c);
    }
}

// NaN, infinities, huge and tiny numbers anywhere are refused or survived; the output is finite or the input itself.
UNIT_TEST(test_poisoned_heads)
{
    static const float POISON[] = {NAN, INFINITY, -INFINITY, 3e38f, -1e30f, 1e-40f, 1e10f};
    uint64_t random = 77;
    for (int round = 0; round < 400; round++) {
        head_case c = open_case(48, 12, 1 + (uint32_t)(case_random(&random) % 24), 32, &random);
        float *arrays[] = {c.k, c.v, c.q}, poison = POISON[case_random(&random) % 7];
        float *array = arrays[case_random(&random) % 3];
        for (int i = 0; i < 1 + round % 40; i++) array[case_random(&random) % (32 * 12)] = poison;
        kvb_status status = refit_case(&c, round % 2);
        ck_assert_int_eq(status, isfinite(poison) ? KVB_OK : KVB_NUMERIC);
        if (status == KVB_OK)
            for (uint32_t i = 0; i < c.h.n_kept * 12; i++) ck_assert(isfinite(c.new_k[i]) && isfinite(c.new_v[i]));
        else ck_assert(is_bare(&c));
        close_case(&c);
    }
}

UNIT_TEST(test_refused)
{
    uint64_t random = 1;
    head_case c = open_case(40, 8, 10, 24, &random);
    size_t bytes = 0;
    kvb_refit_head huge = {UINT32_MAX, 65536, UINT32_MAX, 16777216, NULL, NULL, NULL, NULL};
    ck_assert_int_eq(refit_case(&c, false), KVB_OK);
    c.bytes--;
    ck_assert_int_eq(refit_case(&c, false), KVB_CAPACITY);
    c.bytes++;
    c.positions[3] = c.positions[2];
    ck_assert_int_eq(refit_case(&c, false), KVB_ARGUMENT);
    c.positions[3] = 40;
    ck_assert_int_eq(refit_case(&c, false), KVB_ARGUMENT);
    c.h.k = NULL;
    ck_assert_int_eq(refit_case(&c, false), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_refit_bytes(NULL, &bytes, &c.err), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_refit_bytes(&c.h, NULL, NULL), KVB_ARGUMENT);
    huge.head_dim = 65537;
    ck_assert_int_eq(kvb_refit_bytes(&huge, &bytes, NULL), KVB_ARGUMENT);
    huge.head_dim = 65536;
    kvb_status status = kvb_refit_bytes(&huge, &bytes, NULL);
    ck_assert(status == KVB_UNSUPPORTED || bytes / 4 > (size_t)huge.n_kept * 65536);
    close_case(&c);
}

UNIT_MAIN("runtime_refit")
