// The allocators of other methods, compared with their published figures and a plain sort.
#include "runtime/allocate.h"
#include "unit.h"

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static uint64_t sum_of(const uint32_t *keep, uint32_t n)
{
    uint64_t sum = 0;
    for (uint32_t h = 0; h < n; h++) sum += keep[h];
    return sum;
}

UNIT_TEST(uniform_rounds_as_kvpress_does)
{
    allocate_shape s = {2, 3, 1000};
    uint32_t keep[6];
    ck_assert_uint_eq(allocate_mean(&s, 0.8), 199); // 1 - 0.8 is a little less than 0.2
    ck_assert_uint_eq(allocate_uniform(&s, 0.5, keep), 3000);
    unit_numbers(keep[5], 500, allocate_mean(&s, 0), 1000, allocate_mean(&s, 1), 0);
}

UNIT_TEST(level_meets_every_total_between_the_floors_and_the_whole)
{
    allocate_shape s = {1, 4, 10};
    uint32_t keep[4] = {1, 9, 4, 12};
    allocate_level(&s, 27, 2, keep);
    unit_numbers(sum_of(keep, 4), 27, keep[0], 3, keep[3], 10);
    allocate_level(&s, 3, 2, keep);
    for (int h = 0; h < 4; h++) ck_assert_uint_eq(keep[h], 2);
    allocate_level(&s, 1000, 2, keep);
    for (int h = 0; h < 4; h++) ck_assert_uint_eq(keep[h], 10);
}

// methods.md 4: T = 4096, 80 %, 32 layers: 1597 .. 41, 26214 tokens in all; window 64 is uniform below 6,400 tokens.
UNIT_TEST(pyramid_has_the_published_figures)
{
    allocate_shape s = {32, 1, 4096}, wide = {32, 8, 4096};
    uint32_t keep[256];
    ck_assert(allocate_pyramid(&s, 0.8, 20, 8, keep));
    unit_numbers(keep[0], 1597, keep[31], 41, sum_of(keep, 32), 26214);
    ck_assert(!allocate_pyramid(&wide, 0.8, 20, 64, keep));
    ck_assert_uint_eq(keep[255], 819);
    s.n_tokens = 6401; // 6400 (1 - 0.8) is a little less than 1280
    ck_assert(allocate_pyramid(&s, 0.8, 20, 64, keep));
    s.n_tokens = 6300;
    ck_assert(!allocate_pyramid(&s, 0.8, 20, 64, keep));
    s.n_layers = 1;
    ck_assert(!allocate_pyramid(&s, 0.5, 20, 8, keep));
    ck_assert_uint_eq(keep[0], 3150);
}

// With 70 % of the cache, the upper end is cut at T - window, and the mean does not change.
UNIT_TEST(pyramid_is_cut_at_the_whole_context)
{
    allocate_shape s = {5, 1, 1000};
    uint32_t keep[5];
    ck_assert(allocate_pyramid(&s, 0.3, 20, 8, keep));
    unit_numbers(keep[0], 992, keep[4], 408, sum_of(keep, 5), 3500);
}

typedef struct ranked {
    float score;
    uint32_t head, position;
} ranked;

static int compare_ranked(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    if (x->head != y->head) return x->head < y->head ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

// The definition, step by step: protected tokens and each head's safe ones become infinite, then one sort.
static void plain_ada(const allocate_shape *s, double ratio, double alpha, const float *scores, uint32_t sink,
                      uint32_t window, uint32_t n_groups, uint32_t *keep)
{
    uint32_t n = s->n_layers * s->n_kv_heads / n_groups, tokens = s->n_tokens, mean = allocate_mean(s, ratio);
    ranked *all = malloc((size_t)n * tokens * sizeof *all);
    ck_assert_ptr_nonnull(all);
    for (uint32_t k = 0; k < n_groups; k++) {
        for (uint32_t h = 0; h < n; h++) {
            ranked *own = all + (size_t)h * tokens;
            for (uint32_t t = 0; t < tokens; t++) {
                float score = scores[((size_t)k * n + h) * tokens + t];
                own[t] = (ranked){t < sink || t + window >= tokens ? __builtin_inff() : score, h, t};
            }
            qsort(own, tokens, sizeof *own, compare_ranked);
            for (uint32_t i = 0; i < (uint32_t)(alpha * mean); i++) own[i].score = __builtin_inff();
        }
        qsort(all, (size_t)n * tokens, sizeof *all, compare_ranked);
        for (uint32_t h = 0; h < n; h++) keep[k * n + h] = 0;
        for (size_t i = 0; i < (size_t)n * mean; i++) keep[k * n + all[i].head]++;
    }
    free(all);
}

UNIT_TEST(ada_equals_a_plain_sort)
{
    uint32_t seed = 7;
    for (int round = 0; round < 60; round++) {
        allocate_shape s = {1 + next_random(&seed) % 3, 1 + next_random(&seed) % 4, 20 + next_random(&seed) % 60};
        uint32_t n = s.n_layers * s.n_kv_heads, found[16], expected[16], sink = next_random(&seed) % 4;
        uint32_t levels = round % 3 == 0 ? 4 : 100000; // few levels: many ties
        float scores[12 * 80];
        for (uint32_t i = 0; i < n * s.n_tokens; i++)
            scores[i] = ((float)(next_random(&seed) % levels) - (float)levels / 2) * (1 + (float)(i / s.n_tokens));
        double ratio = (double)(next_random(&seed) % 70) / 100, alpha = (double)(next_random(&seed) % 11) / 10;
        for (int pooled = 0; pooled < 2; pooled++) {
            allocate_ada(&s, ratio, alpha, scores, sink, 2, pooled ? ADA_GLOBAL : ADA_KVPRESS, found);
            plain_ada(&s, ratio, alpha, scores, sink, 2, pooled ? 1 : s.n_layers, expected);
            for (uint32_t h = 0; h < n; h++)
                ck_assert_msg(found[h] == expected[h], "round %d, head %u: %u, not %u", round, h, found[h],
                              expected[h]);
            for (uint32_t h = 0; h < n; h++) ck_assert_uint_ge(found[h], (uint32_t)(alpha * allocate_mean(&s, ratio)));
        }
        const double alike[3] = {0.5, 0.5, 0.5}; // layers of equal weight compete like AdaKV's without safe tokens
        allocate_layers(&s, ratio, alike, scores, sink, 2, found);
        plain_ada(&s, ratio, 0, scores, sink, 2, s.n_layers, expected);
        for (uint32_t h = 0; h < n; h++) ck_assert_uint_eq(found[h], expected[h]);
    }
}

UNIT_TEST(ada_in_its_original_form)
{
    // 12 tokens, the last 2 are the window; n = 6, so 4 of a head's 10 compete for 2 x 4 places: 7 and 1 win.
    allocate_shape s = {1, 2, 12};
    float scores[24] = {9, 9, 9, 9, 9, 9, 9, 0, 0, 0, 0, 0, 8, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0};
    uint32_t keep[2];
    allocate_ada(&s, 0.5, 0.25, scores, 0, 2, ADA_ORIGINAL, keep);
    ck_assert_uint_eq(keep[0], 8); // rint(0.75 * 7 + int(0.25 * 4)) + 2 = rint(6.25) + 2
    ck_assert_uint_eq(keep[1], 4); // rint(0.75 + 1) + 2
}

UNIT_MAIN("runtime_allocate")
