#include "study/stats.h"
#include "runtime/fail.h"
#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>
#include <gsl/gsl_sort.h>
#include <gsl/gsl_statistics.h>
#include <stdlib.h>

// GSL's own handler would abort the program; its only failure here is a lack of memory.
static gsl_rng *make_generator(uint64_t seed)
{
    gsl_error_handler_t *old = gsl_set_error_handler_off();
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    gsl_set_error_handler(old);
    if (rng) gsl_rng_set(rng, (unsigned long)seed);
    return rng;
}

// How often each pair is in one draw of the two stages; returns the number of pairs in it.
static uint64_t draw_pairs(gsl_rng *rng, const loss_sample *s, uint32_t *count)
{
    uint64_t drawn = 0;
    for (uint32_t p = 0; p < s->n_pairs; p++) count[p] = 0;
    for (uint32_t i = 0; i < s->n_texts; i++) {
        uint32_t text = (uint32_t)gsl_rng_uniform_int(rng, s->n_texts);
        uint32_t first = s->first[text], n = s->first[text + 1] - first;
        for (uint32_t q = 0; q < n; q++) count[first + gsl_rng_uniform_int(rng, n)]++;
        drawn += n;
    }
    return drawn;
}

static double relative(double value, double base)
{
    return base > 0 ? value / base - 1 : 0;
}

static loss_interval spread_of(double value, double *draws)
{
    gsl_sort(draws, 1, BOOTSTRAP_DRAWS);
    return (loss_interval){value, gsl_stats_quantile_from_sorted_data(draws, 1, BOOTSTRAP_DRAWS, 0.025),
                           gsl_stats_quantile_from_sorted_data(draws, 1, BOOTSTRAP_DRAWS, 0.975)};
}

kvb_status bootstrap_losses(const loss_sample *s, uint32_t base, uint64_t seed, loss_interval *mean,
                            loss_interval *ratio, kvb_error *err)
{
    if (s->n_methods == 0 || s->n_pairs == 0 || s->n_texts == 0 || base >= s->n_methods)
        return kvb_fail(err, KVB_ARGUMENT, "study: bootstrap of %u methods on %u pairs", s->n_methods, s->n_pairs);
    kvb_status status = KVB_OK;
    size_t n = s->n_methods;
    double *means = malloc(n * BOOTSTRAP_DRAWS * sizeof *means), *ratios = malloc(n * BOOTSTRAP_DRAWS * sizeof *ratios);
    uint32_t *count = malloc(s->n_pairs * sizeof *count);
    gsl_rng *rng = make_generator(seed);
    if (!means || !ratios || !count || !rng)
        status = kvb_fail(err, KVB_MEMORY, "study: not enough memory for %d draws", BOOTSTRAP_DRAWS);
    for (size_t d = 0; d < BOOTSTRAP_DRAWS && status == KVB_OK; d++) {
        uint64_t drawn = draw_pairs(rng, s, count);
        for (size_t m = 0; m < n; m++) {
            double sum = 0;
            for (uint32_t p = 0; p < s->n_pairs; p++) sum += count[p] * s->loss[m * s->n_pairs + p];
            means[m * BOOTSTRAP_DRAWS + d] = drawn ? sum / (double)drawn : 0;
        }
        for (size_t m = 0; m < n; m++)
            ratios[m * BOOTSTRAP_DRAWS + d] =
                relative(means[m * BOOTSTRAP_DRAWS + d], means[base * BOOTSTRAP_DRAWS + d]);
    }
    for (size_t m = 0; m < n && status == KVB_OK; m++) {
        double own = gsl_stats_mean(s->loss + m * s->n_pairs, 1, s->n_pairs);
        double of_base = gsl_stats_mean(s->loss + base * s->n_pairs, 1, s->n_pairs);
        mean[m] = spread_of(own, means + m * BOOTSTRAP_DRAWS);
        ratio[m] = spread_of(relative(own, of_base), ratios + m * BOOTSTRAP_DRAWS);
    }
    if (rng) gsl_rng_free(rng);
    free(count);
    free(ratios);
    free(means);
    return status;
}

// One seed from two: GSL's generator takes 32 bits, so all of both must be mixed into these (splitmix64).
static uint64_t mix(uint64_t seed, uint64_t draw)
{
    uint64_t z = seed * 0x9e3779b97f4a7c15u + draw + 1;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) >> 32;
}

kvb_status draw_subset(uint32_t *chosen, uint32_t k, uint32_t n, uint64_t seed, uint64_t draw, kvb_error *err)
{
    gsl_rng *rng = k <= n ? make_generator(mix(seed, draw)) : NULL;
    uint32_t *all = malloc((n ? n : 1) * sizeof *all);
    kvb_status status = rng && all ? KVB_OK
                        : k > n    ? kvb_fail(err, KVB_ARGUMENT, "study: %u of %u cannot be drawn", k, n)
                                   : kvb_fail(err, KVB_MEMORY, "study: not enough memory to draw from %u", n);
    for (uint32_t i = 0; i < n && all; i++) all[i] = i;
    if (status == KVB_OK && k) gsl_ran_choose(rng, chosen, k, all, n, sizeof *all); // keeps their order
    if (rng) gsl_rng_free(rng);
    free(all);
    return status;
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
