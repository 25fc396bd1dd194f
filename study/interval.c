#include "study/interval.h"
#include "formats/need.h"
#include <gsl/gsl_cdf.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

// Sums over one group or over all groups: of a's values, and of b's values or, without b, their number.
typedef struct sums {
    double a, b;
} sums;

static sums sums_of(const value_groups *a, const double *const *b, uint32_t group)
{
    sums s = {0, b ? 0 : a->counts[group]};
    for (uint32_t i = 0; i < a->counts[group]; i++) {
        s.a += a->values[group][i];
        if (b) s.b += b[group][i];
    }
    return s;
}

static sums sums_of_all(const value_groups *a, const double *const *b)
{
    sums all = {0, 0};
    for (uint32_t g = 0; g < a->n_groups; g++) {
        sums s = sums_of(a, b, g);
        all.a += s.a;
        all.b += s.b;
    }
    return all;
}

// Returns the quotient of the sums, or its logarithm.
static double quotient(sums s, bool logarithm)
{
    return logarithm ? log(s.a / s.b) : s.a / s.b;
}

// Standard error by the jackknife: how far the quotient moves when each group is left out in turn.
static double jackknife(const value_groups *a, const double *const *b, sums all, bool logarithm)
{
    double mean = 0, square = 0, n = a->n_groups;
    for (uint32_t g = 0; g < a->n_groups; g++) {
        sums s = sums_of(a, b, g);
        double without = quotient((sums){all.a - s.a, all.b - s.b}, logarithm), step = without - mean;
        mean += step / (g + 1); // Welford
        square += step * (without - mean);
    }
    return sqrt(square * (n - 1) / n);
}

static interval student(double center, double error, double degrees)
{
    double half = error > 0 ? gsl_cdf_tdist_Pinv(0.975, degrees) * error : 0;
    return (interval){center, center - half, center + half};
}

interval interval_mean(const value_groups *a)
{
    sums all = sums_of_all(a, NULL);
    double mean = quotient(all, false);
    if (a->n_groups < INTERVAL_GROUPS) return (interval){mean, NAN, NAN};
    return student(mean, jackknife(a, NULL, all, false), a->n_groups - 1);
}

// Without b, computes a mean above 0. Two degrees of freedom are spent: on both means of a ratio, or on the mean and on
// the spread, which a few skewed values estimate badly.
interval interval_ratio(const value_groups *a, const double *const *b)
{
    sums all = sums_of_all(a, b);
    double value = all.b > 0 ? quotient(all, false) : NAN;
    if (value == 0) return (interval){0, 0, 0};
    if (isnan(value) || a->n_groups < INTERVAL_GROUPS) return (interval){value, NAN, NAN};
    double error = jackknife(a, b, all, true);
    if (!isfinite(error)) return (interval){value, NAN, NAN}; // all but one group are 0
    interval x = student(log(value), error, a->n_groups - 2);
    return (interval){value, exp(x.low), exp(x.high)};
}

interval interval_positive(const value_groups *a)
{
    return interval_ratio(a, NULL);
}

interval interval_share(const value_groups *a)
{
    sums all = sums_of_all(a, NULL);
    double p = quotient(all, false), n = a->n_groups;
    if (a->n_groups < INTERVAL_GROUPS) return (interval){p, NAN, NAN};
    double error = jackknife(a, NULL, all, false), room = p * (1 - p);
    // The number of independent observations that would have this spread; never more than there are values.
    double seen = error > 0 && room > 0 ? fmin(all.b, fmax(n, room / (error * error))) : n;
    double t = gsl_cdf_tdist_Pinv(0.975, n - 1), share = t * t / seen;
    double center = (p + share / 2) / (1 + share), half = t * sqrt(room / seen + share / seen / 4) / (1 + share);
    return (interval){p, fmax(0, center - half), fmin(1, center + half)};
}

// Returns the standard error of mean(a) - mean(b) by the jackknife over groups.
static double difference_error(const value_groups *a, const double *const *b, sums all, double n_values)
{
    double mean = 0, square = 0, n = a->n_groups;
    for (uint32_t g = 0; g < a->n_groups; g++) {
        sums s = sums_of(a, b, g);
        double without = (all.a - s.a - all.b + s.b) / (n_values - a->counts[g]), step = without - mean;
        mean += step / (g + 1);
        square += step * (without - mean);
    }
    return sqrt(square * (n - 1) / n);
}

interval interval_share_difference(const value_groups *a, const double *const *b)
{
    sums all = sums_of_all(a, b);
    double n = sums_of_all(a, NULL).b, value = (all.a - all.b) / n, square = 0;
    if (a->n_groups < INTERVAL_GROUPS) return (interval){value, NAN, NAN};
    interval x = student(value, difference_error(a, b, all, n), a->n_groups - 1);
    for (uint32_t g = 0; g < a->n_groups; g++)
        for (uint32_t i = 0; i < a->counts[g]; i++) square += pow(a->values[g][i] - b[g][i], 2);
    // All values count, and in addition one observation of 0 and half an observation each of +1 and -1.
    double center = (all.a - all.b) / (n + 2),
           error = sqrt(fmax(0, (square + 1) / (n + 2) - center * center) / (n + 2));
    interval least = student(center, error, n - 1);
    return (interval){value, fmax(-1, fmin(x.low, least.low)), fmin(1, fmax(x.high, least.high))};
}

void loss_intervals(const loss_sample *s, uint32_t base, interval *mean, interval *ratio)
{
    const double **own = need(2 * (size_t)s->n_texts, sizeof *own, "texts"), **others = own + s->n_texts;
    uint32_t *counts = need(s->n_texts, sizeof *counts, "texts");
    for (size_t m = 0; m < s->n_methods; m++) {
        for (uint32_t t = 0; t < s->n_texts; t++) {
            own[t] = s->loss + m * s->n_pairs + s->first[t];
            others[t] = s->loss + (size_t)base * s->n_pairs + s->first[t];
            counts[t] = s->first[t + 1] - s->first[t];
        }
        const value_groups groups = {own, counts, s->n_texts};
        interval x = interval_ratio(&groups, others);
        mean[m] = interval_positive(&groups);
        // If the base loses nothing, there is no ratio: the change counts as 0.
        ratio[m] = isnan(x.value) ? (interval){0, 0, 0} : (interval){x.value - 1, x.low - 1, x.high - 1};
    }
    free_all(counts, own);
}

uint32_t flag_heads(const double *prune_ratio, const double *std, uint32_t n, uint8_t *flags)
{
    uint32_t count = 0;
    for (uint32_t h = 0; h < n; h++) {
        uint8_t flag = std[h] > 1 - prune_ratio[h];
        count += flag;
        if (flags) flags[h] = flag;
    }
    return count;
}
