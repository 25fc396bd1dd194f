#include "evaluator/interval.h"
#include <gsl/gsl_cdf.h>
#include <gsl/gsl_rng.h>
#include <gsl/gsl_sort.h>
#include <gsl/gsl_statistics_double.h>
#include <math.h>

typedef enum statistic { MEAN, RATIO, DIFFERENCE } statistic;

// Sums of values, of those of b (NULL: none), and their number.
typedef struct sums {
    double a, b;
    uint64_t n;
} sums;

static double statistic_of(statistic what, sums s)
{
    switch (what) {
    case RATIO:
        return s.a / s.b;
    case DIFFERENCE:
        return (s.a - s.b) / (double)s.n;
    default:
        return s.a / (double)s.n;
    }
}

static sums add_all(const value_groups *a, const double *const *b)
{
    sums s = {0};
    for (uint32_t g = 0; g < a->n_groups; g++)
        for (uint32_t i = 0; i < a->counts[g]; i++) {
            s.a += a->values[g][i];
            s.b += b ? b[g][i] : 0;
            s.n++;
        }
    return s;
}

static sums add_drawn(const value_groups *a, const double *const *b, gsl_rng *rng)
{
    sums s = {0};
    for (uint32_t g = 0; g < a->n_groups; g++) {
        size_t group = gsl_rng_uniform_int(rng, a->n_groups);
        for (uint32_t i = 0; i < a->counts[group]; i++) {
            size_t at = gsl_rng_uniform_int(rng, a->counts[group]);
            s.a += a->values[group][at];
            s.b += b ? b[group][at] : 0;
            s.n++;
        }
    }
    return s;
}

static interval bootstrap(statistic what, const value_groups *a, const double *const *b, uint64_t seed)
{
    double drawn[INTERVAL_RESAMPLES], center = statistic_of(what, add_all(a, b));
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_taus2);
    if (!rng) return (interval){center, NAN, NAN};
    gsl_rng_set(rng, (unsigned long)(seed + 1));
    for (int r = 0; r < INTERVAL_RESAMPLES; r++) drawn[r] = statistic_of(what, add_drawn(a, b, rng));
    gsl_rng_free(rng);
    gsl_sort(drawn, 1, INTERVAL_RESAMPLES);
    return (interval){center, gsl_stats_quantile_from_sorted_data(drawn, 1, INTERVAL_RESAMPLES, 0.025),
                      gsl_stats_quantile_from_sorted_data(drawn, 1, INTERVAL_RESAMPLES, 0.975)};
}

interval interval_mean(const value_groups *a, uint64_t seed)
{
    return bootstrap(MEAN, a, NULL, seed);
}

interval interval_ratio(const value_groups *a, const double *const *b, uint64_t seed)
{
    return bootstrap(RATIO, a, b, seed);
}

interval interval_difference(const value_groups *a, const double *const *b, uint64_t seed)
{
    return bootstrap(DIFFERENCE, a, b, seed);
}

interval interval_student(const double *values, uint32_t n)
{
    double mean = gsl_stats_mean(values, 1, n);
    if (n < 2) return (interval){mean, NAN, NAN};
    double error = gsl_stats_sd(values, 1, n) / sqrt(n);
    double half = gsl_cdf_tdist_Pinv(0.975, n - 1) * error;
    return (interval){mean, mean - half, mean + half};
}
