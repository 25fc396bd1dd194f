// Policies that look at a part of the cache, RocketKV, Quest, SparQ and top-k: the numbers that their papers give,
// bounds of pages, and turns.
#include "test_evaluator_policy_cases.h"

// ---- RocketKV ----

START_TEST(rocket_split_rule)
{
    rocket_split s = rocket_split_for(131072, 2048, 128); // methods.md 3.6: c = 64
    ck_assert_double_eq_tol(s.exponent, 0.56, 1e-12);
    ck_assert_double_eq_tol(131072 / s.keep, 10.27, 0.005);
    ck_assert_double_eq_tol(s.second, 6.23, 0.005);
    ck_assert_uint_eq(s.page, 3);
    ck_assert_double_eq_tol(128 / s.channels, 2.08, 0.005);
    ck_assert_double_eq_tol(s.channels, 61.6, 0.05);
    ck_assert_uint_eq(s.k1, 61);
    ck_assert_uint_eq(s.k2, 1024);
    ck_assert_double_eq_tol(s.keep, 12766, 0.5);
    // What is read to estimate is what is read to attend, before rounding: (N / p) k1 / (2 d) = t / 2.
    ck_assert_double_eq_tol(s.keep / s.page * s.channels / (2 * 128), 1024, 1e-6);
    s = rocket_split_for(109 * 1000, 256, 128);
    ck_assert_double_eq_tol(s.exponent, 0.724, 0.0005);
    ck_assert_double_eq_tol(s.keep, 1361, 1);
    ck_assert_uint_eq(s.k1, 72);
    s = rocket_split_for(500, 512, 64); // c <= 1: dense
    ck_assert(s.keep == 500 && s.page == 1 && s.k1 == 64);
    policy p;
    help_ok(policy_parse(&p, "rocketkv", err));
    ck_assert_double_eq_tol(policy_capacity_ratio(&p, 1 - 1.0 / 64), 1 - 1 / pow(64, 0.56), 1e-12);
    help_ok(policy_parse(&p, "quest", err));
    ck_assert(policy_capacity_ratio(&p, 0.8) == 0.8);
}
END_TEST

START_TEST(pages_bound_their_keys)
{
    enum { N = 200, PAGE = 16, DIM = 32 };
    float *k = case_floats((size_t)N * DIM, 1, 0), low[(N / PAGE + 1) * DIM], high[(N / PAGE + 1) * DIM];
    uint32_t all[DIM], group = 3;
    for (uint32_t c = 0; c < DIM; c++) all[c] = c;
    hsa s = {DIM, group, PAGE, 0, low, high};
    for (uint32_t i = 0; i < N; i++) hsa_absorb(&s, k + i * DIM);
    ck_assert_uint_eq(s.n, N);
    for (int trial = 0; trial < 50; trial++) {
        float *q = case_floats((size_t)group * DIM, 1, 0);
        for (uint32_t r = 1; r < group; r++) // signs that agree; magnitudes that do not
            for (uint32_t c = 0; c < DIM; c++) q[r * DIM + c] = copysignf(q[r * DIM + c], q[c]);
        for (uint32_t r = 0; r < group; r++)
            for (uint32_t i = 0; i < N; i++) {
                double dot = 0;
                for (uint32_t c = 0; c < DIM; c++) dot += (double)q[r * DIM + c] * k[i * DIM + c];
                ck_assert_double_le(dot, (double)hsa_estimate(&s, q, r, i / PAGE, all, DIM) + 1e-5);
            }
        free(q);
    }
    free(k);
}
END_TEST

// What the policy looks at for one query over keys that are all there.
static uint32_t look(const char *spec, uint32_t capacity, double split, const float *q, float *k, uint32_t n,
                     uint32_t group, uint32_t d, uint32_t *out)
{
    rig *r = calloc(1, sizeof *r);
    help_ok(policy_parse(&r->p, spec, err));
    r->h = (policy_head){
        .p = &r->p, .group = group, .head_dim = d, .capacity = capacity, .n_context = n, .room = n, .split = split};
    r->h.memory = case_alloc(r->p.kind->floats(&r->h), sizeof(float));
    r->h.marks = case_alloc(n, sizeof(uint32_t));
    uint32_t found = r->p.kind->choose(&r->h, (kv_span){.k = k, .count = n}, q, out);
    close_rig(r);
    return found;
}

static double overlap(const uint32_t *a, uint32_t n, const uint32_t *b, uint32_t m)
{
    uint32_t both = 0;
    for (uint32_t i = 0, j = 0; i < n && j < m;) {
        both += a[i] == b[j];
        if (a[i] <= b[j]) i++;
        else j++;
    }
    return (double)both / n;
}

START_TEST(corners_of_sparse_attention)
{
    enum { N = 400, DIM = 64, H = 3, K = 40 };
    float *k = case_floats((size_t)N * DIM, 1, 0);
    for (uint32_t i = 1; i < N; i++) // neighbours resemble each other, as keys of a text do
        for (uint32_t c = 0; c < DIM; c++) k[i * DIM + c] = 0.8f * k[(i - 1) * DIM + c] + 0.6f * k[i * DIM + c];
    double found[3] = {0};
    for (int trial = 0; trial < 20; trial++) {
        float *q = case_floats((size_t)H * DIM, 1, 0);
        for (uint32_t c = 0; c < DIM; c += 4) q[c] *= 4, q[DIM + c] *= 4; // some channels matter more
        uint32_t best[N], got[N], n_best = look("topk", K, 0, q, k, N, H, DIM, best);
        ck_assert_uint_eq(n_best, K);
        // Exact top-k by hand: mean over the group of the softmax, the newest token in any case.
        double a[N] = {0}, worst = 1e9, beyond = 0;
        for (uint32_t r = 0; r < H; r++) {
            double e[N], sum = 0;
            for (uint32_t i = 0; i < N; i++) {
                double dot = 0;
                for (uint32_t c = 0; c < DIM; c++) dot += (double)q[r * DIM + c] * k[i * DIM + c];
                sum += e[i] = exp(dot / sqrt(DIM));
            }
            for (uint32_t i = 0; i < N; i++) a[i] += e[i] / sum;
        }
        for (uint32_t i = 0, at = 0; i + 1 < N; i++) {
            bool in = at < K && best[at] == i;
            at += in;
            if (in) worst = fmin(worst, a[i]);
            else beyond = fmax(beyond, a[i]);
        }
        ck_assert_uint_eq(best[K - 1], N - 1);
        ck_assert_double_ge(worst, beyond * (1 - 1e-5));
        ck_assert_uint_eq(look("quest:page=1", K, 0, q, k, N, H, DIM, got), K);
        ck_assert_mem_eq(best, got, K * sizeof *best);
        ck_assert_uint_eq(look("sparq:channels=64", K, 0, q, k, N, H, DIM, got), K);
        ck_assert_mem_eq(best, got, K * sizeof *best);
        found[0] += overlap(best, K, got, look("quest:page=8", K, 0, q, k, N, H, DIM, got)) / 20;
        found[1] += overlap(best, K, got, look("sparq:channels=32", K, 0, q, k, N, H, DIM, got)) / 20;
        uint32_t n = look("rocketkv", N, 0.8, q, k, N, H, DIM, got); // all were kept by the first stage
        found[2] += overlap(got, n, best, K) / 20;
        // A budget for everything is dense attention.
        ck_assert_uint_eq(look("topk", N, 0, q, k, N, H, DIM, got), UINT32_MAX);
        ck_assert_uint_eq(look("quest", N, 0, q, k, N, H, DIM, got), UINT32_MAX);
        ck_assert_uint_eq(look("rocketkv", N, 0, q, k, N, H, DIM, got), UINT32_MAX);
        free(q);
    }
    // By chance it would be a tenth.
    for (int i = 0; i < 3; i++) ck_assert_msg(found[i] > 0.3, "%d: %.2f of exact top-k is found", i, found[i]);
    free(k);
}
END_TEST

START_TEST(turns_lose_nothing)
{
    enum { T = 300, DIM = 16, W = 4, NEW = 6, CAP = 80 }; // the pool is 63 wide
    float *k = case_floats((size_t)(T + 2 * NEW) * DIM, 0.3, 0), *q = case_floats((size_t)T * DIM, 0.3, 0);
    float far[DIM], near[DIM];
    for (uint32_t c = 0; c < DIM; c++) { // two places that two turns ask for
        far[c] = c % 2 ? 3.0f : 0, near[c] = c % 2 ? 0 : 3.0f;
        k[60 * DIM + c] = far[c], k[220 * DIM + c] = near[c];
    }
    for (uint32_t i = T - W; i < T; i++) memcpy(q + i * DIM, near, sizeof near);
    layer_view view = view_of(q, k, NULL, T, T, 1, DIM);
    rig *r = open_rig("rocketkv-mt:window=4", CAP, T, T + 2 * NEW, 1, DIM);
    uint32_t indices[T + 2 * NEW], count = T;
    prefill(r, &view);
    ck_assert_uint_eq(r->n, T);
    r->h.split = 0.5;
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < NEW; i++) {
            count++;
            uint32_t n = r->p.kind->choose(&r->h, (kv_span){.k = k, .count = count}, turn ? far : near, indices);
            ck_assert_uint_le(turn ? n : 0, CAP + 2 * NEW);
        }
        help_ok(policy_new_turn(&r->h, (kv_span){.k = k, .count = count}, err));
        bool has_far = false, has_near = false;
        for (uint32_t i = 0; i < r->h.counts[1]; i++)
            has_far = has_far || r->h.marks[i] == 60, has_near = has_near || r->h.marks[i] == 220;
        // What the first turn did not choose is still there for the second.
        ck_assert(turn ? has_far : has_near && !has_far);
        ck_assert_uint_eq(r->h.counts[1], CAP);
        ck_assert_uint_eq(r->h.counts[2], count);
    }
    close_rig(r);
    free(k), free(q);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, rocket_split_rule);
    tcase_add_test(tc, pages_bound_their_keys);
    tcase_add_test(tc, corners_of_sparse_attention);
    tcase_add_test(tc, turns_lose_nothing);
}

UNIT_MAIN("policies that look", fill)
