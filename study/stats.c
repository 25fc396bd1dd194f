#include "study/stats.h"
#include "runtime/fail.h"
#include "stats/interval.h"
#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>
#include <math.h>
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

static loss_interval shifted(interval x, double by)
{
    return (loss_interval){x.value - by, x.low - by, x.high - by};
}

// Loss of a ratio's base that is 0 says nothing: the change is 0.
static loss_interval change_of(const value_groups *own, const double *const *base)
{
    interval x = interval_ratio(own, base);
    return isnan(x.value) ? (loss_interval){0, 0, 0} : shifted(x, 1);
}

kvb_status loss_intervals(const loss_sample *s, uint32_t base, loss_interval *mean, loss_interval *ratio,
                          kvb_error *err)
{
    if (s->n_methods == 0 || s->n_pairs == 0 || s->n_texts == 0 || base >= s->n_methods)
        return kvb_fail(err, KVB_ARGUMENT, "study: intervals of %u methods on %u pairs", s->n_methods, s->n_pairs);
    const double **own = calloc(2 * (size_t)s->n_texts, sizeof *own), **others = own + s->n_texts;
    uint32_t *counts = calloc(s->n_texts, sizeof *counts);
    kvb_status status = own && counts ? KVB_OK : kvb_fail(err, KVB_MEMORY, "study: no memory for %u texts", s->n_texts);
    for (size_t m = 0; m < s->n_methods && status == KVB_OK; m++) {
        for (uint32_t t = 0; t < s->n_texts; t++) {
            own[t] = s->loss + m * s->n_pairs + s->first[t];
            others[t] = s->loss + (size_t)base * s->n_pairs + s->first[t];
            counts[t] = s->first[t + 1] - s->first[t];
        }
        const value_groups groups = {own, counts, s->n_texts};
        mean[m] = shifted(interval_positive(&groups), 0);
        ratio[m] = change_of(&groups, others);
    }
    free(counts);
    free(own);
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
