// Policies that evict by keys and values alone, KeyDiff and LagKV: against their rules written down a second time, and
// kvpress's block by block.
#include "test_evaluator_policy_cases.h"

// ---- KeyDiff ----

// Keeps the best n by -sum of cosines with all others (the pairwise form), in double; `keep` lists the candidates.
static uint32_t pairwise_best(const float *k, uint32_t *keep, uint32_t n, uint32_t capacity)
{
    double s[256];
    for (uint32_t i = 0; i < n; i++) {
        s[i] = 0;
        for (uint32_t j = 0; j < n; j++) {
            double dot = 0, a = 0, b = 0;
            for (uint32_t c = 0; c < D; c++) {
                double x = k[keep[i] * D + c], y = k[keep[j] * D + c];
                dot += x * y, a += x * x, b += y * y;
            }
            s[i] -= dot / sqrt(a * b);
        }
    }
    while (n > capacity) {
        uint32_t worst = 0;
        for (uint32_t i = 1; i < n; i++)
            if (s[i] <= s[worst]) worst = i;
        for (uint32_t i = worst; i + 1 < n; i++) keep[i] = keep[i + 1], s[i] = s[i + 1];
        n--;
    }
    return n;
}

START_TEST(keydiff_blocks)
{
    enum { T = 150, N = 40 };
    float *k = case_floats((size_t)T * D, 1, 0.3);
    layer_view view = view_of(NULL, k, NULL, T, 0, 1, D);
    const uint32_t blocks[] = {16, 37, 200};
    for (int b = 0; b < 3; b++) {
        char spec[40];
        uint32_t want[256], n = N;
        snprintf(spec, sizeof spec, "keydiff:block=%u", blocks[b]);
        rig *r = open_rig(spec, N, T, ROOM, 1, D);
        prefill(r, &view);
        for (uint32_t i = 0; i < N; i++) want[i] = i;
        for (uint32_t at = N; at < T; at += blocks[b]) {
            for (uint32_t i = at; i < T && i < at + blocks[b]; i++) want[n++] = i;
            n = pairwise_best(k, want, n, N);
        }
        ck_assert_uint_eq(r->n, N);
        for (uint32_t i = 0; i < N; i++) ck_assert_uint_eq(r->keep[i], want[i]);
        if (b == 2) { // a block that holds everything is the one-shot selection of the metric
            metric m;
            float scores[T];
            uint32_t once[N];
            help_ok(metric_parse(&m, "keydiff", err));
            help_ok(metric_score(&m, &view, scores, err));
            help_ok(kvb_select(scores, T, N, 0, 0, once, N, err));
            for (uint32_t i = 0; i < N; i++) ck_assert_uint_eq(r->keep[i], once[i]);
        }
        close_rig(r);
    }
    free(k);
}
END_TEST

// The keys of tests/golden/make_blocks.py.
static float *golden_keys(uint32_t T, uint32_t d, uint32_t seed)
{
    float *k = case_alloc((size_t)T * d, sizeof *k);
    for (size_t i = 0; i < (size_t)T * d; i++) {
        seed = seed * 1664525u + 1013904223u;
        k[i] = ((float)(seed >> 8) - (float)(1 << 23)) / (float)(1 << 23);
    }
    for (uint32_t j = 0; j < T; j++) k[(size_t)j * d] += 0.5f;
    return k;
}

START_TEST(keydiff_blocks_of_kvpress)
{
    FILE *f = fopen("tests/golden/blocks.txt", "r");
    ck_assert_msg(f, "tests/golden/blocks.txt: run from the root of the repository");
    uint32_t T, d, block, seed, n, cases = 0;
    double ratio;
    while (fscanf(f, "%u %u %u %lf %u %u", &T, &d, &block, &ratio, &seed, &n) == 6) {
        char spec[40];
        float *k = golden_keys(T, d, seed);
        layer_view view = view_of(NULL, k, NULL, T, 0, 1, d);
        snprintf(spec, sizeof spec, "keydiff:block=%u", block);
        rig *r = open_rig(spec, n, T, T, 1, d);
        prefill(r, &view);
        ck_assert_uint_eq(r->n, n);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t want;
            ck_assert_int_eq(fscanf(f, "%u", &want), 1);
            ck_assert_msg(r->keep[i] == want, "T %u, d %u, block %u, ratio %g: %u is kept, expected %u", T, d, block,
                          ratio, r->keep[i], want);
        }
        close_rig(r);
        free(k);
        cases++;
    }
    fclose(f);
    ck_assert_uint_eq(cases, 20);
}
END_TEST

START_TEST(keydiff_windows)
{
    enum { T = 150, N = 40 };
    float *k = case_floats((size_t)T * D, 1, 0.3);
    layer_view view = view_of(NULL, k, NULL, T, 0, 1, D);
    rig *all = open_rig("keydiff:block=16:window=1", N, T, ROOM, 1, D),
        *some = open_rig("keydiff:block=16:window=0.25", N, T, ROOM, 1, D),
        *stream = open_rig("streaming:sinks=0", N, T, ROOM, 1, D);
    prefill(all, &view), prefill(some, &view), prefill(stream, &view);
    ck_assert_uint_eq(all->n, stream->n); // f = 1 is StreamingLLM without sinks
    for (uint32_t i = 0; i < N; i++) ck_assert_uint_eq(all->keep[i], stream->keep[i]);
    for (uint32_t i = 0; i < N / 4; i++) ck_assert_uint_eq(some->keep[N - 1 - i], T - 1 - i);
    ck_assert_uint_lt(some->keep[0], T - N);
    // In decode a block is one token: 41 keys, of which the one nearest to all others goes.
    rig *step = open_rig("keydiff", N, T, ROOM, 1, D);
    uint32_t want[256];
    for (uint32_t i = 0; i <= N; i++) want[i] = i;
    help_ok(step->p.kind->evict(&step->h, (kv_span){.k = k, .count = N + 1}, step->keep, &step->n, err));
    ck_assert_uint_eq(step->n, pairwise_best(k, want, N + 1, N));
    for (uint32_t i = 0; i < N; i++) ck_assert_uint_eq(step->keep[i], want[i]);
    close_rig(all), close_rig(some), close_rig(stream), close_rig(step);
    free(k);
}
END_TEST

// ---- LagKV ----

START_TEST(lagkv_lengths)
{
    enum { T = 20496, SMALL = 2 };
    float *k = case_floats((size_t)T * SMALL, 1, 0), *v = case_floats((size_t)T * SMALL, 1, 0);
    layer_view view = view_of(NULL, k, v, T, 0, 1, SMALL);
    rig *r = open_rig("lagkv:lag=1024:sink=16:keep=0.125", 1, T, T, 1, SMALL);
    prefill(r, &view);
    ck_assert_uint_eq(r->n, 3472); // the paper's example: 16.9 %
    // By capacity: at most what it says, and less than one token of each partition below it.
    for (uint32_t capacity = 2500; capacity < 20000; capacity += 3500) {
        rig *c = open_rig("lagkv:lag=1024:sink=16", capacity, T, T, 1, SMALL);
        prefill(c, &view);
        ck_assert_uint_le(c->n, capacity);
        ck_assert_uint_gt(c->n + 20, capacity);
        close_rig(c);
    }
    close_rig(r);
    free(k), free(v);
}
END_TEST

START_TEST(lagkv_recursion)
{
    enum { T = 200, LAG = 16, SINK = 4, KEPT = 4, AFTER = 100 };
    float *k = case_floats((size_t)(T + AFTER) * D, 1, 0), *v = case_floats((size_t)(T + AFTER) * D, 1, 0);
    layer_view view = view_of(NULL, k, v, T, 0, 1, D);
    rig *r = open_rig("lagkv:lag=16:sink=4:keep=0.25", 1, T, ROOM, 1, D);
    prefill(r, &view);
    uint32_t n = (T - SINK) / LAG, expected = SINK + KEPT * (n - 1) + LAG + (T - SINK) % LAG;
    ck_assert_uint_eq(r->n, expected);
    // The same tokens as the metric's ranks within partitions give.
    metric m;
    float scores[T];
    help_ok(metric_parse(&m, "lagkv:paper:lag=16:sink=4", err));
    help_ok(metric_score(&m, &view, scores, err));
    for (uint32_t p = 0; p + 1 < n; p++)
        for (uint32_t i = 0; i < KEPT; i++) {
            uint32_t at = r->keep[SINK + p * KEPT + i];
            ck_assert_uint_eq((at - SINK) / LAG, p);
            ck_assert(scores[at] >= (float)(LAG - KEPT) / LAG);
        }
    // In decode: what is compressed stays as it is; one partition is cut for every LAG new tokens.
    uint32_t positions[ROOM], before[ROOM], cuts = 0;
    memcpy(positions, r->keep, r->n * sizeof *positions);
    uint32_t count = r->n, fixed = r->h.counts[0];
    for (uint32_t t = T; t < T + AFTER; t++) {
        float keys[ROOM * D], values[ROOM * D];
        positions[count++] = t;
        memcpy(before, positions, sizeof before);
        for (uint32_t i = 0; i < count; i++) {
            memcpy(keys + i * D, k + positions[i] * D, D * sizeof(float));
            memcpy(values + i * D, v + positions[i] * D, D * sizeof(float));
        }
        help_ok(r->p.kind->evict(&r->h, (kv_span){.k = keys, .v = values, .count = count}, r->keep, &r->n, err));
        for (uint32_t i = 0; i < fixed; i++) ck_assert_uint_eq(r->keep[i], i);
        ck_assert_uint_lt(r->n - r->h.counts[0], 2 * LAG);
        cuts += r->n < count;
        ck_assert(r->n == count || r->n == count - LAG + KEPT);
        for (uint32_t i = 0; i < r->n; i++) positions[i] = before[r->keep[i]];
        count = r->n, fixed = r->h.counts[0];
    }
    ck_assert_uint_ge(cuts, AFTER / LAG);
    ck_assert_uint_le(cuts, AFTER / LAG + 1);
    close_rig(r);
    free(k), free(v);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, keydiff_blocks);
    tcase_add_test(tc, keydiff_blocks_of_kvpress);
    tcase_add_test(tc, keydiff_windows);
    tcase_add_test(tc, lagkv_lengths);
    tcase_add_test(tc, lagkv_recursion);
}

UNIT_MAIN("policies by keys", fill)
