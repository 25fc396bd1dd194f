#include "study/promise.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdlib.h>

// Bets, as shares of the largest one that can never lose more than its stake, and their stakes. If the limit is a small
// part of the cap, the largest is nearly always the best; the others serve losses that vary much.
enum { BETS = 4 };
static const double BET[BETS] = {1, 0.5, 0.25, 0.125}, STAKE[BETS] = {0.5, 0.25, 0.125, 0.125};

double promise_p_value(const double *loss, uint32_t n, double limit, double times)
{
    double wealth = 0;
    for (int k = 0; k < BETS; k++) {
        double bet = BET[k] / (1 - limit), sum = 0;
        for (uint32_t i = 0; i < n; i++) sum += log1p(fmax(-1, bet * (limit - loss[i])));
        wealth += STAKE[k] * exp(times * sum); // a loss of 1 under the largest bet: log(0), no wealth left
    }
    return wealth > 1 ? 1 / wealth : 1;
}

static const uint32_t MOST_TEXTS = 1000000;

uint32_t promise_texts_needed(const double *loss, uint32_t n, double limit, double error)
{
    uint32_t low = 0, high = MOST_TEXTS; // low fails, high passes
    if (promise_p_value(loss, n, limit, (double)high / n) > error) return 0;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (promise_p_value(loss, n, limit, (double)middle / n) <= error) high = middle;
        else low = middle;
    }
    return high;
}

uint32_t promise_least_texts(double limit, double error)
{
    return promise_texts_needed(&(double){0}, 1, limit, error);
}

static kvb_status check_task(const promise_task *t, kvb_error *err)
{
    if (!(t->error > 0 && t->error < 1) || t->n_texts == 0 || t->n_ratios == 0 || t->n_criteria == 0)
        return kvb_fail(err, KVB_ARGUMENT, "promise: %u texts, %u ratios, %u limits and an error of %g, expected some",
                        t->n_texts, t->n_ratios, t->n_criteria, t->error);
    for (uint32_t c = 0; c < t->n_criteria; c++) {
        const promise_criterion *one = &t->criteria[c];
        if (!(one->limit > 0 && one->limit < one->cap && isfinite(one->cap)))
            return kvb_fail(err, KVB_ARGUMENT, "promise: limit %g with cap %g, expected 0 < limit < cap", one->limit,
                            one->cap);
        for (size_t i = 0; i < (size_t)t->n_ratios * t->n_texts; i++)
            if (!isfinite(one->values[i]))
                return kvb_fail(err, KVB_NUMERIC, "promise: ratio %zu, text %zu: a loss that is not a number",
                                i / t->n_texts, i % t->n_texts);
    }
    return KVB_OK;
}

// Judges one ratio. scratch [n_texts] receives the losses in units of the cap.
static promise_row judge_ratio(const promise_task *t, const promise_criterion *c, uint32_t ratio, double *scratch)
{
    uint32_t n = t->n_texts;
    const double *values = c->values + (size_t)ratio * t->n_texts;
    promise_row row = {0};
    for (uint32_t i = 0; i < n; i++) {
        scratch[i] = fmin(fmax(values[i], 0), c->cap) / c->cap;
        row.mean += values[i] / n;
        row.clipped += scratch[i] * c->cap / n;
    }
    row.p = promise_p_value(scratch, n, c->limit / c->cap, 1);
    return row;
}

kvb_status promise_ask(promise_task *t, promise_criterion *out, const double *limits, double cap, const double *values,
                       kvb_error *err)
{
    static const char *const NAMES[PROMISE_LIMITS] = {"KL", "changed tokens", "NLL"}, *const MEASURES[PROMISE_LIMITS] =
                                                                                          {"kl", "flips", "nll"};
    t->criteria = out;
    t->n_criteria = 0;
    for (size_t i = 0; i < PROMISE_LIMITS; i++) {
        if (isnan(limits[i])) continue;
        double most = i == PROMISE_FLIPS ? 1 : cap > 0 ? cap : 5 * limits[i];
        uint32_t least = promise_least_texts(limits[i] / most, t->error);
        out[t->n_criteria++] =
            (promise_criterion){limits[i], most, values + i * t->n_ratios * t->n_texts, NAMES[i], MEASURES[i]};
        if (t->n_texts >= least) continue;
        return kvb_fail(err, KVB_ARGUMENT,
                        "%u texts promise nothing: with a limit of %g on %s, clipped at %g, %g %% confidence takes at "
                        "least %u texts even if nothing were lost; give more texts%s, or ask for less --confidence",
                        t->n_texts, limits[i], NAMES[i], most, 100 * (1 - t->error), least,
                        most < 1 ? ", a smaller --cap" : "");
    }
    return KVB_OK;
}

kvb_status promise_find(const promise_task *t, promise_row *rows, uint32_t *n_passed, kvb_error *err)
{
    *n_passed = 0;
    kvb_status status = check_task(t, err);
    if (status != KVB_OK) return status;
    double *scratch = need(t->n_texts, sizeof *scratch, "texts");
    for (uint32_t r = 0; r < t->n_ratios; r++) {
        bool passed = true;
        for (uint32_t c = 0; c < t->n_criteria; c++) {
            promise_row row = judge_ratio(t, &t->criteria[c], r, scratch);
            passed = passed && row.p <= t->error;
            if (rows) rows[(size_t)c * t->n_ratios + r] = row;
        }
        if (passed && *n_passed == r) ++*n_passed;
    }
    free(scratch);
    return KVB_OK;
}
