// Policies of one KV head: those that evict by attention, compared with their rules written a second time; KeyDiff,
// LagKV and kvpress's version block by block; RocketKV, Quest, SparQ and top-k, compared with numbers of their papers;
// bounds of pages, and turns.
#include "evaluator/policy.h"
#include "formats/need.h"
#include "test_profiler_cases.h"

enum { ROOM = 512, D = 8 };

// A head with the state that a run would give it.
typedef struct rig {
    policy p;
    policy_head h;
    uint32_t keep[32768], n;
} rig;

static rig *open_rig(const char *spec, uint32_t capacity, uint32_t n_context, uint32_t room, uint32_t group, uint32_t d)
{
    rig *r = calloc(1, sizeof *r);
    help_ok(policy_parse(&r->p, spec, err));
    r->h = (policy_head){
        .p = &r->p, .group = group, .head_dim = d, .capacity = capacity, .n_context = n_context, .room = room};
    r->h.memory = case_alloc(r->p.kind->floats ? r->p.kind->floats(&r->h) : 1, sizeof(float));
    r->h.marks = case_alloc(room, sizeof(uint32_t));
    return r;
}

static void close_rig(rig *r)
{
    free_all(r->h.memory, r->h.marks, r);
}

static layer_view view_of(const float *q, const float *k, const float *v, uint32_t T, uint32_t n, uint32_t g,
                          uint32_t d)
{
    return (layer_view){
        .n_tokens = T, .n_heads = g, .n_kv_heads = 1, .head_dim = d, .q = q, .k = k, .v = v, .n_queries = n};
}

static void prefill(rig *r, const layer_view *view)
{
    help_ok(policy_prefill(&r->h, view, NULL, r->keep, &r->n, err));
}

static void evict(rig *r, uint32_t count)
{
    help_ok(policy_evict(&r->h, (kv_span){.count = count}, r->keep, &r->n, err));
}

// ---- MorphKV ----

enum { STEPS = 120, RECENT = 5, CAPACITY = 17, GROUP = 2 };

// The sum over the group of each step's weight for each position, filled step by step; -1: not looked at.
static float history[STEPS + 64][STEPS + 64];

// Returns the step's random weights for the entries at `positions`, and adds them to `history`. The caller frees them.
static float *draw_weights(const uint32_t *positions, uint32_t count, uint32_t step)
{
    float *w = case_alloc((size_t)GROUP * count, sizeof *w);
    for (uint32_t p = 0; p < STEPS + 64; p++) history[step][p] = 0;
    for (uint32_t h = 0; h < GROUP; h++)
        for (uint32_t j = 0; j < count; j++) {
            w[h * count + j] = (float)pow(case_uniform() * 0.5 + 0.5, 4);
            history[step][positions[j]] += w[h * count + j];
        }
    return w;
}

static float morph_rule(uint32_t step, uint32_t position, bool maximum)
{
    float f = 0;
    for (uint32_t r = 0; r < RECENT && r <= step; r++) {
        float x = history[step - r][position];
        f = maximum ? fmaxf(f, x) : f + x;
    }
    return f;
}

static float h2o_rule(uint32_t step, uint32_t position, bool maximum)
{
    float f = 0;
    (void)maximum;
    for (uint32_t r = 0; r <= step; r++) f += history[r][position] / GROUP;
    return f;
}

static float tova_rule(uint32_t step, uint32_t position, bool maximum)
{
    (void)maximum;
    return history[step][position] / GROUP;
}

// Runs the policy step by step from an empty cache. It must keep what the rule says of the whole history: the last
// `recent` and the best of the others.
static void follow_rule(const char *spec, float (*rule)(uint32_t, uint32_t, bool), bool maximum, uint32_t recent)
{
    rig *r = open_rig(spec, CAPACITY, 0, CAPACITY + 1, GROUP, D);
    uint32_t positions[CAPACITY + 1], count = 0;
    for (uint32_t step = 0; step < STEPS; step++) {
        positions[count++] = step;
        ck_assert_uint_le(count, CAPACITY + 1);
        float *weights = draw_weights(positions, count, step);
        r->p.kind->attended(&r->h, (kv_span){.count = count}, weights);
        free(weights);
        evict(r, count);
        ck_assert_uint_eq(r->n, count < CAPACITY ? count : CAPACITY); // never above C + R after a step
        for (uint32_t gone = 0, at = 0; gone < count - r->n; at++) {
            // One entry is evicted per step: the worst of the older ones.
            bool stays = false;
            for (uint32_t i = 0; i < r->n; i++) stays = stays || r->keep[i] == at;
            if (stays) continue;
            gone++;
            ck_assert_msg(at + recent < count, "%s: step %u evicts a recent token", spec, step);
            float f = rule(step, positions[at], maximum);
            for (uint32_t i = 0; i + recent < count; i++) {
                float other = rule(step, positions[i], maximum);
                ck_assert_msg(other >= f * (1 - 1e-5f), "%s: step %u evicts %u with %g, though %u has %g", spec, step,
                              positions[at], (double)f, positions[i], (double)other);
            }
        }
        for (uint32_t i = 0; r->n < count && i < r->n; i++) positions[i] = positions[r->keep[i]];
        count = r->n;
    }
    close_rig(r);
}

UNIT_TEST(policies_follow_their_rules)
{
    follow_rule("morphkv:window=5", morph_rule, false, RECENT);
    follow_rule("morphkv:window=5:fusion=max", morph_rule, true, RECENT);
    follow_rule("tova", tova_rule, false, 1);
    follow_rule("h2o", h2o_rule, false, CAPACITY / 2);
    follow_rule("h2o:recent=0.2", h2o_rule, false, 3);
}

UNIT_TEST(streaming_by_position)
{
    rig *r = open_rig("streaming", 10, 50, ROOM, 1, D);
    evict(r, 50);
    ck_assert_uint_eq(r->n, 10);
    for (uint32_t i = 0; i < 10; i++) ck_assert_uint_eq(r->keep[i], i < 4 ? i : 40 + i);
    evict(r, 7);
    ck_assert_uint_eq(r->n, 7);
    close_rig(r);
}

// After the prefill, policies that look at queries select as they do after a step.
UNIT_TEST(prefills_select)
{
    enum { T = 60, H = 2 };
    float *q = case_floats((size_t)T * H * D, 1, 0), *k = case_floats((size_t)T * D, 1, 0), sums[H * T] = {0};
    layer_view view = view_of(q, k, NULL, T, T, H, D);
    view.column_sums = sums;
    for (uint32_t i = 0; i < H * T; i++) sums[i] = (float)(i % T == 7 || i % T == 11);
    rig *r = open_rig("h2o", 4, T, ROOM, H, D);
    prefill(r, &view);
    ck_assert(r->n == 4 && r->keep[0] == 7 && r->keep[1] == 11 && r->keep[2] == T - 2 && r->keep[3] == T - 1);
    close_rig(r);
    const char *const specs[] = {"morphkv:window=6", "tova"};
    for (int s = 0; s < 2; s++) {
        uint32_t recent = s ? 1 : 6;
        r = open_rig(specs[s], 20, T, ROOM, H, D);
        prefill(r, &view);
        ck_assert_uint_eq(r->n, 20);
        // The same by hand: attention of the last queries, in double.
        double f[T] = {0};
        for (uint32_t h = 0; h < H; h++)
            for (uint32_t i = T - recent; i < T; i++) {
                double a[T], sum = 0;
                for (uint32_t j = 0; j <= i; j++) {
                    double x = 0;
                    for (uint32_t c = 0; c < D; c++) x += (double)q[(i * H + h) * D + c] * k[j * D + c];
                    sum += a[j] = exp(x / sqrt(D));
                }
                for (uint32_t j = 0; j <= i; j++) f[j] += a[j] / sum;
            }
        double worst = 1e9, best = 0;
        for (uint32_t j = 0, at = 0; j < T - recent; j++) {
            bool stays = at < r->n && r->keep[at] == j;
            at += stays;
            if (stays) worst = fmin(worst, f[j]);
            else best = fmax(best, f[j]);
        }
        ck_assert_msg(worst >= best * (1 - 1e-5), "%s keeps %g and evicts %g", specs[s], worst, best);
        for (uint32_t i = 0; i < recent; i++) ck_assert_uint_eq(r->keep[r->n - recent + i], T - recent + i);
        close_rig(r);
    }
    free_all(q, k);
}

UNIT_TEST(specs)
{
    policy p;
    help_ok(policy_parse(&p, "morphkv:fusion=max:window=32", err));
    ck_assert_str_eq(p.spec, "morphkv:fusion=max");
    help_ok(policy_parse(&p, "morphkv:fusion=max", err));
    ck_assert(p.set.morphkv.fusion == 1 && p.set.morphkv.window == 32);
    help_fails(policy_parse(&p, "morph", err), KVB_ARGUMENT, "expected one of full, morphkv");
    help_fails(policy_parse(&p, "morphkv:window=0", err), KVB_ARGUMENT, "from 1 to 4096");
    help_fails(policy_parse(&p, "morphkv:window=1.5", err), KVB_ARGUMENT, "window expects an integer");
    help_fails(policy_parse(&p, "morphkv:fusion=mean", err), KVB_ARGUMENT, "sum|max");
    help_fails(policy_parse(&p, "quest:pages=2", err), KVB_ARGUMENT,
               "character 7: 'pages=2' is not parameter=value; parameters of quest: page");
    help_fails(policy_parse(&p, "quest:page", err), KVB_ARGUMENT, "'page' is not parameter=value");
    // Two policies that differ in the last digit of a parameter share no key of a log.
    static const char *const pairs[][2] = {{"keydiff:block=1048575", "keydiff:block=1048574"},
                                           {"h2o:recent=0.3", "h2o:recent=0.30000000000000004"},
                                           {"lagkv:keep=0.1234567", "lagkv:keep=0.12345671"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        policy a, b;
        help_ok(policy_parse(&a, pairs[i][0], err));
        help_ok(policy_parse(&b, pairs[i][1], err));
        unit_strings(a.spec, pairs[i][0], b.spec, pairs[i][1]);
    }
}

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

// Returns the keys of tests/golden/make_blocks.py.
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

UNIT_TEST(keydiff_blocks_of_kvpress)
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

UNIT_TEST(keydiff_windows)
{
    enum { T = 150, N = 40 };
    float *k = case_floats((size_t)T * D, 1, 0.3);
    layer_view view = view_of(NULL, k, NULL, T, 0, 1, D);
    rig *all = open_rig("keydiff:block=16:window=1", N, T, ROOM, 1, D),
        *some = open_rig("keydiff:block=16:window=0.25", N, T, ROOM, 1, D),
        *stream = open_rig("streaming:sinks=0", N, T, ROOM, 1, D);
    prefill(all, &view);
    prefill(some, &view);
    prefill(stream, &view);
    ck_assert_uint_eq(all->n, stream->n); // f = 1 is StreamingLLM without sinks
    for (uint32_t i = 0; i < N; i++) ck_assert_uint_eq(all->keep[i], stream->keep[i]);
    for (uint32_t i = 0; i < N / 4; i++) ck_assert_uint_eq(some->keep[N - 1 - i], T - 1 - i);
    ck_assert_uint_lt(some->keep[0], T - N);
    // While decoding, a block is one token: of N + 1 keys, the one nearest to all others is evicted.
    rig *step = open_rig("keydiff", N, T, ROOM, 1, D);
    uint32_t want[256];
    for (uint32_t i = 0; i <= N; i++) want[i] = i;
    help_ok(policy_evict(&step->h, (kv_span){.k = k, .count = N + 1}, step->keep, &step->n, err));
    ck_assert_uint_eq(step->n, pairwise_best(k, want, N + 1, N));
    for (uint32_t i = 0; i < N; i++) ck_assert_uint_eq(step->keep[i], want[i]);
    close_rig(all);
    close_rig(some);
    close_rig(stream);
    close_rig(step);
    free(k);
}

// ---- LagKV ----

UNIT_TEST(lagkv_lengths)
{
    enum { T = 20496, SMALL = 2 };
    float *k = case_floats((size_t)T * SMALL, 1, 0), *v = case_floats((size_t)T * SMALL, 1, 0);
    layer_view view = view_of(NULL, k, v, T, 0, 1, SMALL);
    rig *r = open_rig("lagkv:lag=1024:sink=16:keep=0.125", 1, T, T, 1, SMALL);
    prefill(r, &view);
    ck_assert_uint_eq(r->n, 3472); // the paper's example: 16.9 %
    // For a given capacity: at most that many, and less than one token of each partition below it.
    for (uint32_t capacity = 2500; capacity < 20000; capacity += 3500) {
        rig *c = open_rig("lagkv:lag=1024:sink=16", capacity, T, T, 1, SMALL);
        prefill(c, &view);
        ck_assert_uint_le(c->n, capacity);
        ck_assert_uint_gt(c->n + 20, capacity);
        close_rig(c);
    }
    close_rig(r);
    free_all(k, v);
}

UNIT_TEST(lagkv_recursion)
{
    enum { T = 200, LAG = 16, SINK = 4, KEPT = 4, AFTER = 100 };
    float *k = case_floats((size_t)(T + AFTER) * D, 1, 0), *v = case_floats((size_t)(T + AFTER) * D, 1, 0);
    layer_view view = view_of(NULL, k, v, T, 0, 1, D);
    rig *r = open_rig("lagkv:lag=16:sink=4:keep=0.25", 1, T, ROOM, 1, D);
    prefill(r, &view);
    uint32_t n = (T - SINK) / LAG, expected = SINK + KEPT * (n - 1) + LAG + (T - SINK) % LAG;
    ck_assert_uint_eq(r->n, expected);
    // The tokens are those that the metric's ranks within partitions select.
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
    // While decoding, compressed entries do not change, and one partition is cut for every LAG new tokens.
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
        help_ok(policy_evict(&r->h, (kv_span){.k = keys, .v = values, .count = count}, r->keep, &r->n, err));
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
    free_all(k, v);
}

// ---- RocketKV ----

UNIT_TEST(rocket_split_rule)
{
    rocket_split s = rocket_split_for(131072, 2048, 128); // methods.md 3.6: c = 64
    ck_assert_double_eq_tol(s.exponent, 0.56, 1e-12);
    ck_assert_double_eq_tol(131072 / s.keep, 10.27, 0.005);
    ck_assert_double_eq_tol(s.second, 6.23, 0.005);
    ck_assert_uint_eq(s.page, 3);
    ck_assert_double_eq_tol(128 / s.channels, 2.08, 0.005);
    ck_assert_double_eq_tol(s.channels, 61.6, 0.05);
    unit_numbers(s.k1, 61, s.k2, 1024);
    ck_assert_double_eq_tol(s.keep, 12766, 0.5);
    // The estimate reads as much as attention, before rounding: (N / p) k1 / (2 d) = t / 2.
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

static double product(const float *a, const float *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

UNIT_TEST(pages_bound_their_keys)
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
        for (uint32_t r = 1; r < group; r++) // signs agree, magnitudes do not
            for (uint32_t c = 0; c < DIM; c++) q[r * DIM + c] = copysignf(q[r * DIM + c], q[c]);
        for (uint32_t r = 0; r < group; r++)
            for (uint32_t i = 0; i < N; i++) {
                double dot = product(q + r * DIM, k + i * DIM, DIM);
                ck_assert_double_le(dot, (double)hsa_estimate(&s, q, r, i / PAGE, all, DIM) + 1e-5);
            }
        free(q);
    }
    free(k);
}

// Puts in `out` which keys the policy looks at for one query, if all n keys are kept. Returns their number.
static uint32_t look(const char *spec, uint32_t capacity, double split, const float *q, float *k, uint32_t n,
                     uint32_t group, uint32_t d, uint32_t *out)
{
    rig *r = open_rig(spec, capacity, n, n, group, d);
    r->h.split = split;
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

UNIT_TEST(corners_of_sparse_attention)
{
    enum { N = 400, DIM = 64, H = 3, K = 40, WIDE = 300 };
    float *k = case_floats((size_t)N * DIM, 1, 0);
    for (uint32_t i = 1; i < N; i++) // neighbours resemble each other, as keys of a text do
        for (uint32_t c = 0; c < DIM; c++) k[i * DIM + c] = 0.8f * k[(i - 1) * DIM + c] + 0.6f * k[i * DIM + c];
    double found[3] = {0};
    for (int trial = 0; trial < 20; trial++) {
        float *q = case_floats((size_t)H * DIM, 1, 0);
        for (uint32_t c = 0; c < DIM; c += 4) q[c] *= 4, q[DIM + c] *= 4; // some channels matter more
        uint32_t best[N], got[N], n_best = look("topk", K, 0, q, k, N, H, DIM, best);
        ck_assert_uint_eq(n_best, K);
        // Exact top-k by hand: the best means of the softmax over the group, and always the newest token.
        double a[N] = {0}, worst = 1e9, beyond = 0;
        for (uint32_t r = 0; r < H; r++) {
            double e[N], sum = 0;
            for (uint32_t i = 0; i < N; i++) sum += e[i] = exp(product(q + r * DIM, k + i * DIM, DIM) / sqrt(DIM));
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
        uint32_t n = look("rocketkv", N, 0.8, q, k, N, H, DIM, got); // the first stage kept all keys
        found[2] += overlap(got, n, best, K) / 20;
        // A budget for all tokens means dense attention.
        unit_numbers(look("topk", N, 0, q, k, N, H, DIM, got), UINT32_MAX, look("quest", N, 0, q, k, N, H, DIM, got),
                     UINT32_MAX, look("rocketkv", N, 0, q, k, N, H, DIM, got), UINT32_MAX);
        free(q);
    }
    uint32_t got[N]; // a group of any size
    ck_assert_uint_eq(look("quest", K, 0, k, k, N, WIDE, 8, got), K);
    for (int i = 0; i < 3; i++) // chance would give 0.1
        ck_assert_msg(found[i] > 0.3, "%d: %.2f of exact top-k is found", i, found[i]);
    free(k);
}

UNIT_TEST(turns_lose_nothing)
{
    enum { T = 300, DIM = 16, W = 4, NEW = 6, CAP = 80 }; // the pool is 63 wide
    float *k = case_floats((size_t)(T + 2 * NEW) * DIM, 0.3, 0), *q = case_floats((size_t)T * DIM, 0.3, 0);
    float far[DIM], near[DIM];
    for (uint32_t c = 0; c < DIM; c++) { // two places, one for each turn's queries
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
        // What the first turn did not choose is still available to the second.
        ck_assert(turn ? has_far : has_near && !has_far);
        unit_numbers(r->h.counts[1], CAP, r->h.counts[2], count);
    }
    close_rig(r);
    free_all(k, q);
}

UNIT_MAIN("policies")
