// Philox against the published vectors, the uniform numbers and the draws against their distributions, and what a draw
// depends on.
#include "profiler/backend/sampler.h"
#include "test_profiler_cases.h"
#include <gsl/gsl_cdf.h>

UNIT_TEST(test_philox_vectors) // kat_vectors of Random123, philox4x32 with 10 rounds
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } cases[] = {
        {{0}, {0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t got[4];
        philox4x32(cases[i].counter, cases[i].key, got);
        for (int w = 0; w < 4; w++)
            ck_assert_msg(got[w] == cases[i].want[w], "vector %d, word %d: %08x, expected %08x", i, w, got[w],
                          cases[i].want[w]);
    }
}

// Chi-square of observed counts against probabilities; cells with fewer than five expected draws are merged. Fails
// above the 99.9 % quantile: the seeds are fixed, so it fails always or never.
static void chi_square(const char *what, const uint64_t *seen, const double *probability, size_t n, double draws)
{
    double sum = 0, rest_seen = 0, rest_expected = 0;
    int cells = 0;
    for (size_t i = 0; i < n; i++) {
        double expected = probability[i] * draws;
        if (expected < 5) {
            rest_seen += (double)seen[i], rest_expected += expected;
            continue;
        }
        sum += ((double)seen[i] - expected) * ((double)seen[i] - expected) / expected;
        cells++;
    }
    if (rest_expected >= 5) {
        sum += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
        cells++;
    }
    ck_assert_int_ge(cells, 2);
    double limit = gsl_cdf_chisq_Pinv(0.999, cells - 1);
    ck_assert_msg(sum <= limit, "%s: chi-square %g over %d cells, the 99.9 %% quantile is %g", what, sum, cells, limit);
}

UNIT_TEST(test_uniform_distribution)
{
    enum { N = 200000, BINS = 64 };
    static const char *const names[] = {"steps", "questions", "contexts", "seeds"};
    for (int along = 0; along < 4; along++) {
        uint64_t seen[BINS] = {0};
        int outside = 0;
        double mean = 0, square = 0, even[BINS];
        for (uint32_t i = 0; i < N; i++) {
            double u = sampler_uniform(along == 3 ? i : 7, along == 2 ? i : 11, along == 1 ? i : 3, along == 0 ? i : 5);
            outside += !(u >= 0 && u < 1);
            mean += u, square += u * u;
            seen[(int)(u * BINS) & (BINS - 1)]++;
        }
        ck_assert_msg(outside == 0, "%s: %d numbers are not in [0, 1)", names[along], outside);
        mean /= N;
        ck_assert_double_eq_tol(mean, 0.5, 5 * sqrt(1.0 / 12 / N));
        ck_assert_double_eq_tol(square / N - mean * mean, 1.0 / 12, 5 * sqrt(1.0 / 180 / N));
        for (int b = 0; b < BINS; b++) even[b] = 1.0 / BINS;
        chi_square(names[along], seen, even, BINS, N);
    }
}

UNIT_TEST(test_uniform_depends_on_every_bit)
{
    const uint64_t seed = 0x123456789abcdef0, context = 0xfedcba9876543210;
    const uint32_t question = 29, step = 63;
    double base = sampler_uniform(seed, context, question, step);
    ck_assert_double_eq(sampler_uniform(seed, context, question, step), base);
    for (int bit = 0; bit < 64; bit++) {
        ck_assert_double_ne(sampler_uniform(seed ^ 1ull << bit, context, question, step), base);
        ck_assert_double_ne(sampler_uniform(seed, context ^ 1ull << bit, question, step), base);
        if (bit >= 32) continue;
        ck_assert_double_ne(sampler_uniform(seed, context, question ^ 1u << bit, step), base);
        ck_assert_double_ne(sampler_uniform(seed, context, question, step ^ 1u << bit), base);
    }
    ck_assert_double_ne(sampler_uniform(1, 1, 2, 3), sampler_uniform(1, 1, 3, 2)); // arguments are not interchangeable
    ck_assert_double_ne(sampler_uniform(1, 2, 1, 3), sampler_uniform(2, 1, 1, 3));
    ck_assert_double_ne(sampler_uniform(1, 2, 3, 3), sampler_uniform(1, 3, 2, 3));
}

// Draws over 40 tokens, one of them impossible, against softmax(logits / temperature) in long double.
static void draws_follow(double temperature)
{
    enum { N = 40, DRAWS = 40000 };
    sampler s = {.temperature = temperature, .seed = CASES_SEED};
    float *logits = case_floats(N, 4, 0);
    uint64_t seen[N] = {0};
    double p[N];
    long double total = 0;
    char what[64];
    logits[17] = -INFINITY;
    for (int i = 0; i < N; i++) total += expl(logits[i] / (long double)temperature);
    for (int i = 0; i < N; i++) p[i] = (double)(expl(logits[i] / (long double)temperature) / total);
    for (uint32_t i = 0; i < DRAWS; i++) {
        int32_t id = sampler_draw(&s, logits, N, &(draw_key){i % 7, i / 7 % 100, i / 700});
        if (id < 0 || id >= N) ck_abort_msg("temperature %g draws token %d", temperature, id);
        seen[id]++;
    }
    snprintf(what, sizeof what, "temperature %g", temperature);
    ck_assert_uint_eq(seen[17], 0);
    chi_square(what, seen, p, N, DRAWS);
    free(logits);
}

UNIT_TEST(test_draws_follow_the_softmax)
{
    draws_follow(0.7);
    draws_follow(1);
    draws_follow(3);
    draws_follow(1e6); // flat: every possible token alike
}

UNIT_TEST(test_greedy)
{
    sampler s = {.greedy = true};
    const float ties[] = {-1, 3, 2, 3, -INFINITY, 3}, low[] = {-INFINITY, -3e38f, -INFINITY}, zeros[] = {-0.0f, 0.0f};
    ck_assert_int_eq(sampler_draw(&s, ties, 6, &(draw_key){1, 2, 3}), 1);
    ck_assert_int_eq(sampler_draw(&s, ties + 2, 4, &(draw_key){1, 2, 3}), 1);
    ck_assert_int_eq(sampler_draw(&s, low, 3, &(draw_key){1, 2, 3}), 1);
    ck_assert_int_eq(sampler_draw(&s, zeros, 2, &(draw_key){1, 2, 3}), 0);
    ck_assert_int_eq(sampler_draw(&s, ties, 1, &(draw_key){1, 2, 3}), 0);
}

UNIT_TEST(test_logits_that_are_no_numbers)
{
    for (int greedy = 0; greedy < 2; greedy++) {
        sampler s = {greedy, 0.7, 1};
        float nan_first[] = {NAN, 1, 2}, nan_last[] = {1, 2, NAN}, inf[] = {1, INFINITY, 2},
              none[] = {-INFINITY, -INFINITY}, nothing[] = {0};
        ck_assert_int_eq(sampler_draw(&s, nan_first, 3, &(draw_key){1, 2, 3}), -1);
        ck_assert_int_eq(sampler_draw(&s, nan_last, 3, &(draw_key){1, 2, 3}), -1);
        ck_assert_int_eq(sampler_draw(&s, none, 2, &(draw_key){1, 2, 3}), -1);
        ck_assert_int_eq(sampler_draw(&s, inf, 3, &(draw_key){1, 2, 3}), -1); // an overflow: softmax is not a number
        ck_assert_int_eq(sampler_draw(&s, nothing, 0, &(draw_key){1, 2, 3}), -1);
    }
}

UNIT_TEST(test_temperature_limits)
{
    static const double cold[] = {1e-3, 1e-30, 1e-45, 1e-300, 4.9e-324}, hot[] = {1e10, 1e45, 1e300};
    const float logits[] = {0.5f, 1.75f, -INFINITY, 1.5f, -2}, tie[] = {2, 1, 2};
    for (uint32_t step = 0; step < 200; step++) {
        for (int i = 0; i < 5; i++) {
            sampler s = {.temperature = cold[i], .seed = 5};
            int32_t id = sampler_draw(&s, logits, 5, &(draw_key){1, 2, step});
            ck_assert_msg(id == 1, "temperature %g draws token %d, expected the largest logit", cold[i], id);
        }
    }
    for (int i = 0; i < 3; i++) { // the hotter, the flatter, but the impossible is never drawn
        sampler s = {.temperature = hot[i], .seed = 5};
        int seen[5] = {0};
        for (uint32_t step = 0; step < 400; step++) seen[sampler_draw(&s, logits, 5, &(draw_key){1, 2, step})]++;
        for (int t = 0; t < 5; t++)
            ck_assert_msg(t == 2 ? seen[t] == 0 : seen[t] > 60, "temperature %g: token %d is drawn %d times of 400",
                          hot[i], t, seen[t]);
    }
    for (int i = 0; i < 5; i++) { // at low temperatures, equal logits are still equally likely
        sampler s = {.temperature = cold[i], .seed = 5};
        int seen[3] = {0};
        for (uint32_t step = 0; step < 400; step++) seen[sampler_draw(&s, tie, 3, &(draw_key){1, 2, step})]++;
        ck_assert_int_eq(seen[1], 0);
        ck_assert_msg(seen[0] > 140 && seen[2] > 140, "temperature %g: of a tie, %d and %d", cold[i], seen[0], seen[2]);
    }
}

UNIT_TEST(test_scale_of_draws)
{
    sampler s = {false, 0.7, 1};
    ck_assert(sampler_scale(&s) == (float)(1 / 0.7));
    s.temperature = 1;
    ck_assert(sampler_scale(&s) == 1);
}

UNIT_MAIN("profiler sampler")
