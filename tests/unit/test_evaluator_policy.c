// Policies as pure functions on one head: against rules written down a second time, over whole histories by position;
// and the numbers that their papers give.
#include "test_evaluator_policy_cases.h"

// ---- MorphKV ----

START_TEST(morph_walk_through)
{
    // Two queries give the first token 0.3 and 0.3, the second 0.05 and 0.05: with room for one older token, the first
    // stays.
    for (int maximum = 0; maximum < 2; maximum++) {
        rig *r = open_rig(maximum ? "morphkv:window=2:fusion=max" : "morphkv:window=2:fusion=sum", 3, 4, ROOM, 1, D);
        const float first[] = {0.3f, 0.05f, 0.65f}, second[] = {0.3f, 0.05f, 0.25f, 0.4f};
        r->p.kind->attended(&r->h, (kv_span){.count = 3}, first);
        evict(r, 3);
        ck_assert_uint_eq(r->n, 3);
        r->p.kind->attended(&r->h, (kv_span){.count = 4}, second);
        evict(r, 4);
        ck_assert_uint_eq(r->n, 3);
        ck_assert(r->keep[0] == 0 && r->keep[1] == 2 && r->keep[2] == 3);
        close_rig(r);
    }
    // A row that is older than a token counts 0 for it, also where another token stood there before.
    rig *r = open_rig("morphkv:window=2", 3, 4, ROOM, 1, D);
    const float rows[3][4] = {{0.1f, 0.2f, 0.7f}, {0.15f, 0.1f, 0.35f, 0.4f}, {0.1f, 0.3f, 0.3f, 0.3f}};
    r->p.kind->attended(&r->h, (kv_span){.count = 3}, rows[0]);
    r->p.kind->attended(&r->h, (kv_span){.count = 4}, rows[1]); // F = 0.25, 0.3 for tokens 0 and 1
    evict(r, 4);
    ck_assert(r->n == 3 && r->keep[0] == 1 && r->keep[1] == 2 && r->keep[2] == 3);
    r->p.kind->attended(&r->h, (kv_span){.count = 4}, rows[2]); // F = 0.1 + 0.1, 0.35 + 0.3 for tokens 1 and 2
    evict(r, 4);
    ck_assert(r->n == 3 && r->keep[0] == 1 && r->keep[1] == 2 && r->keep[2] == 3);
    close_rig(r);
}
END_TEST

enum { STEPS = 120, RECENT = 5, CAPACITY = 17, GROUP = 2 };

// Every query's group sum for every position, filled as the steps come; -1: not looked at.
static float history[STEPS + 64][STEPS + 64];

// The step's weights over the entries at `positions`, remembered by position.
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

// The policy, step by step from an empty cache, keeps what the rule says of the whole history: the last `recent` and
// the best of the others.
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
            // One goes per step: the worst of the older ones.
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

START_TEST(policies_follow_their_rules)
{
    follow_rule("morphkv:window=5", morph_rule, false, RECENT);
    follow_rule("morphkv:window=5:fusion=max", morph_rule, true, RECENT);
    follow_rule("tova", tova_rule, false, 1);
    follow_rule("h2o", h2o_rule, false, CAPACITY / 2);
    follow_rule("h2o:recent=0.2", h2o_rule, false, 3);
}
END_TEST

START_TEST(streaming_by_position)
{
    rig *r = open_rig("streaming", 10, 50, ROOM, 1, D);
    evict(r, 50);
    ck_assert_uint_eq(r->n, 10);
    for (uint32_t i = 0; i < 10; i++) ck_assert_uint_eq(r->keep[i], i < 4 ? i : 40 + i);
    evict(r, 7);
    ck_assert_uint_eq(r->n, 7);
    close_rig(r);
}
END_TEST

// The prefill's selection of policies that look at queries is the one that a step makes.
START_TEST(prefills_select)
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
    free(q), free(k);
}
END_TEST

START_TEST(specs)
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
        ck_assert_str_eq(a.spec, pairs[i][0]);
        ck_assert_str_eq(b.spec, pairs[i][1]);
    }
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, morph_walk_through);
    tcase_add_test(tc, policies_follow_their_rules);
    tcase_add_test(tc, streaming_by_position);
    tcase_add_test(tc, prefills_select);
    tcase_add_test(tc, specs);
}

UNIT_MAIN("policies", fill)
