// Intervals against theory, against values worked by hand, and their coverage in simulations of few texts; intervals of
// losses, and draws of subsets.
#include "study/interval.h"
#include "test_solver_cases.h"
#include <gsl/gsl_randist.h>

enum { GROUPS = 20, VALUES = 16 };

typedef struct sample {
    double a[GROUPS][VALUES], b[GROUPS][VALUES];
    const double *rows[GROUPS], *others[GROUPS];
    uint32_t counts[GROUPS];
} sample;

static value_groups groups_of(sample *s, uint32_t n)
{
    for (uint32_t g = 0; g < n; g++) s->rows[g] = s->a[g], s->others[g] = s->b[g], s->counts[g] = VALUES;
    return (value_groups){s->rows, s->counts, n};
}

// Texts differ in how hard they are (the logarithm's standard deviation is `spread`), and two ways to split the cache
// share nine tenths of that; positions of a text scatter as exponential values do. The true ratio is 0.4.
static void draw_texts(sample *s, uint32_t n, double spread, gsl_rng *rng)
{
    for (uint32_t g = 0; g < n; g++) {
        double hard = gsl_ran_ugaussian(rng), own = 0.9 * hard + sqrt(1 - 0.81) * gsl_ran_ugaussian(rng);
        for (int i = 0; i < VALUES; i++) {
            s->a[g][i] = 0.4 * exp(spread * own) * gsl_ran_exponential(rng, 1);
            s->b[g][i] = exp(spread * hard) * gsl_ran_exponential(rng, 1);
        }
    }
}

static bool holds(interval x, double truth)
{
    return x.low <= truth && truth <= x.high;
}

// Per cent of 4,000 simulations with the truth in the interval: 0 ratio, 1 positive mean, 2 share, 3 difference.
static void cover(uint32_t n, double spread, double covered[4])
{
    enum { RUNS = 4000 };
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    gsl_rng_set(rng, 11 + n);
    sample s;
    value_groups a = groups_of(&s, n);
    for (int i = 0; i < 4; i++) covered[i] = 0;
    for (int run = 0; run < RUNS; run++) {
        draw_texts(&s, n, spread, rng);
        covered[0] += holds(interval_ratio(&a, s.others), 0.4);
        covered[1] += holds(interval_positive(&a), 0.4 * exp(spread * spread / 2));
        // Right answers: 80 and 60 of 100, in texts of their own difficulty.
        for (uint32_t g = 0; g < n; g++) {
            double p = gsl_ran_beta(rng, 8, 2), q = gsl_ran_beta(rng, 6, 4);
            for (int i = 0; i < VALUES; i++) {
                s.a[g][i] = gsl_rng_uniform(rng) < p;
                s.b[g][i] = gsl_rng_uniform(rng) < q;
            }
        }
        covered[2] += holds(interval_share(&a), 0.8);
        covered[3] += holds(interval_share_difference(&a, s.others), 0.2);
    }
    for (int i = 0; i < 4; i++) covered[i] *= 100.0 / RUNS;
    gsl_rng_free(rng);
}

UNIT_TEST(paired_intervals_cover_92_to_98_per_cent_for_5_8_and_20_texts)
{
    static const uint32_t texts[] = {5, 8, 20};
    static const double spreads[] = {0.4, 0.7};
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 2; k++) {
            double covered[4];
            cover(texts[i], spreads[k], covered);
            printf("%u texts, spread %g: ratio %.1f %%, mean of KL %.1f %%, share %.1f %%, difference %.1f %%\n",
                   texts[i], spreads[k], covered[0], covered[1], covered[2], covered[3]);
            for (int w = 0; w < 4; w++)
                ck_assert_msg(covered[w] >= 92 && covered[w] <= 98.5 && (w > 0 || covered[w] <= 98),
                              "%u texts, spread %g, kind %d: %.2f %%", texts[i], spreads[k], w, covered[w]);
        }
}

UNIT_TEST(fewer_than_five_groups_say_nothing)
{
    sample s = {.a = {{1, 2}, {3, 4}}, .b = {{1, 1}, {1, 1}}};
    value_groups a = groups_of(&s, 2);
    interval all[] = {interval_mean(&a), interval_positive(&a), interval_ratio(&a, s.others), interval_share(&a),
                      interval_share_difference(&a, s.others)};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ck_assert(!isnan(all[i].value) && isnan(all[i].low) && isnan(all[i].high));
    a.n_groups = INTERVAL_GROUPS - 1;
    ck_assert(isnan(interval_mean(&a).low));
}

UNIT_TEST(a_mean_is_that_of_students_tables)
{
    // One value per group: 1 .. 5 have mean 3 and error sqrt(0.5); t(4, 0.975) = 2.776445.
    double v[5] = {1, 2, 3, 4, 5};
    const double *rows[5] = {v, v + 1, v + 2, v + 3, v + 4};
    const uint32_t ones[5] = {1, 1, 1, 1, 1}, uneven[5] = {1, 4, 2, 5, 3};
    interval x = interval_mean(&(value_groups){rows, ones, 5});
    ck_assert(fabs(x.value - 3) < 1e-12 && fabs(x.high - x.value - 2.776445 * sqrt(0.5)) < 1e-5);
    ck_assert(fabs(x.high + x.low - 2 * x.value) < 1e-12);
    // Equal values have no spread.
    double flat[5] = {2, 2, 2, 2, 2};
    const double *same[5] = {flat, flat, flat, flat, flat};
    x = interval_mean(&(value_groups){same, uneven, 5});
    ck_assert(x.value == 2 && x.low == 2 && x.high == 2);
}

UNIT_TEST(ratios_of_the_same_draws_have_no_spread_and_zeros_no_logarithm)
{
    sample s;
    value_groups a = groups_of(&s, 6);
    for (int g = 0; g < 6; g++)
        for (int i = 0; i < VALUES; i++) s.a[g][i] = 3 * (s.b[g][i] = 1 + g + i);
    interval x = interval_ratio(&a, s.others);
    ck_assert(fabs(x.value - 3) < 1e-12 && fabs(x.low - 3) < 1e-9 && fabs(x.high - 3) < 1e-9);
    for (int g = 0; g < 6; g++)
        for (int i = 0; i < VALUES; i++) s.a[g][i] = 0;
    x = interval_positive(&a);
    ck_assert(x.value == 0 && x.low == 0 && x.high == 0 && interval_ratio(&a, s.others).value == 0);
    s.a[2][3] = 1; // without this group nothing is left
    x = interval_positive(&a);
    ck_assert(x.value > 0 && isnan(x.low));
    ck_assert(isnan(interval_ratio(&(value_groups){s.others, s.counts, 6},
                                   (const double *const[]){s.a[0], s.a[0], s.a[0], s.a[0], s.a[0], s.a[0]})
                        .value));
}

UNIT_TEST(all_right_is_not_certain)
{
    sample s;
    value_groups a = groups_of(&s, 20);
    for (int g = 0; g < 20; g++)
        for (int i = 0; i < VALUES; i++) s.a[g][i] = s.b[g][i] = 1;
    interval share = interval_share(&a), difference;
    for (int g = 0; g < 20; g++) s.counts[g] = 1; // twenty answers, all the same
    difference = interval_share_difference(&a, s.others);
    ck_assert(share.value == 1 && share.high == 1 && share.low > 0.7 && share.low < 0.9);
    ck_assert(difference.value == 0 && difference.low < -0.02 && difference.high > 0.02);
    ck_assert(difference.low > -0.2 && difference.high < 0.2);
}

// Ten equal questions of each of six texts are worth six observations, not sixty; two texts give no interval.
UNIT_TEST(questions_of_a_text_are_not_independent)
{
    double loss[120];
    for (int i = 0; i < 60; i++) loss[60 + i] = 0.8 * (loss[i] = 1 + i / 10);
    const uint32_t first[7] = {0, 10, 20, 30, 40, 50, 60};
    loss_sample s = {2, 60, 6, loss, first};
    interval mean[2], ratio[2];
    loss_intervals(&s, 0, mean, ratio);
    ck_assert_double_eq_tol(mean[0].value, 3.5, 1e-12);
    ck_assert(mean[0].low < 2 && mean[0].high > 5);
    ck_assert(ratio[0].value == 0 && fabs(ratio[0].low) < 1e-12 && fabs(ratio[0].high) < 1e-12);
    // A fixed ratio has no spread: methods are compared text by text.
    ck_assert(fabs(ratio[1].value + 0.2) < 1e-12 && ratio[1].high - ratio[1].low < 1e-12);
    s = (loss_sample){1, 20, 2, loss, first};
    loss_intervals(&s, 0, mean, ratio);
    ck_assert(mean[0].value == 1.5 && isnan(mean[0].low) && isnan(mean[0].high));
}

UNIT_TEST(heads_on_which_pairs_disagree_are_flagged)
{
    const double prune_ratio[3] = {0.9, 0.9, 0}, std[3] = {0.05, 0.11, 0};
    uint8_t flags[3];
    ck_assert_uint_eq(flag_heads(prune_ratio, std, 3, flags), 1);
    ck_assert(!flags[0] && flags[1] && !flags[2]);
}

UNIT_MAIN("study/interval")
