#include "study/promise.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/interval.h"
#include <math.h>
#include <stdlib.h>

// ---- p-values ----

// Bets, as shares of the largest that can lose nothing but itself, and what is staked on each. Where the limit is a
// small part of the cap, the largest is nearly always the best; the others serve losses that vary much.
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

// ---- How many texts ----

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

// ---- Fixed-sequence testing ----

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
                return kvb_fail(err, KVB_NUMERIC, "promise: ratio %zu, text %zu: a loss that is no number",
                                i / t->n_texts, i % t->n_texts);
    }
    return KVB_OK;
}

// One ratio over the n texts that `chosen` lists (NULL: the first n), losses in units of the cap into scratch [n].
static promise_row judge_ratio(const promise_task *t, const promise_criterion *c, uint32_t ratio,
                               const uint32_t *chosen, uint32_t n, double *scratch)
{
    const double *values = c->values + (size_t)ratio * t->n_texts;
    promise_row row = {0};
    for (uint32_t i = 0; i < n; i++) {
        double value = values[chosen ? chosen[i] : i];
        scratch[i] = fmin(fmax(value, 0), c->cap) / c->cap;
        row.mean += value / n;
        row.clipped += scratch[i] * c->cap / n;
    }
    row.p = promise_p_value(scratch, n, c->limit / c->cap, 1);
    return row;
}

static uint32_t count_passed(const promise_task *t, const uint32_t *chosen, uint32_t n, double *scratch)
{
    for (uint32_t r = 0; r < t->n_ratios; r++)
        for (uint32_t c = 0; c < t->n_criteria; c++)
            if (judge_ratio(t, &t->criteria[c], r, chosen, n, scratch).p > t->error) return r;
    return t->n_ratios;
}

kvb_status promise_find(const promise_task *task, promise_row *rows, uint32_t *n_passed, kvb_error *err)
{
    *n_passed = 0;
    kvb_status status = check_task(task, err);
    if (status != KVB_OK) return status;
    double *scratch = need(task->n_texts, sizeof *scratch, "texts");
    *n_passed = count_passed(task, NULL, task->n_texts, scratch);
    for (uint32_t c = 0; rows && c < task->n_criteria; c++)
        for (uint32_t r = 0; r < task->n_ratios; r++)
            rows[(size_t)c * task->n_ratios + r] =
                judge_ratio(task, &task->criteria[c], r, NULL, task->n_texts, scratch);
    free(scratch);
    return KVB_OK;
}

// ---- Has it been kept? ----

// The texts that `chosen` [k], ascending, leaves out.
static void list_others(const uint32_t *chosen, uint32_t k, uint32_t n, uint32_t *others)
{
    for (uint32_t i = 0, at = 0; i < n; i++)
        if (at < k && chosen[at] == i) at++;
        else *others++ = i;
}

static bool is_broken(const promise_task *t, uint32_t ratio, const uint32_t *others, uint32_t n, double *scratch)
{
    for (uint32_t c = 0; c < t->n_criteria; c++)
        if (judge_ratio(t, &t->criteria[c], ratio, others, n, scratch).clipped > t->criteria[c].limit) return true;
    return false;
}

kvb_status promise_try(const promise_task *task, uint32_t draws, uint64_t seed, promise_trial *out, kvb_error *err)
{
    uint32_t n = task->n_texts, half = n / 2;
    *out = (promise_trial){.draws = draws};
    kvb_status status = check_task(task, err);
    if (status == KVB_OK && half == 0) status = kvb_fail(err, KVB_ARGUMENT, "promise: 1 text cannot be halved");
    if (status != KVB_OK) return status;
    uint32_t *texts = need(n, sizeof *texts, "texts");
    double *scratch = need(n, sizeof *scratch, "texts");
    for (uint32_t i = 0; i < draws; i++) {
        draw_subset(texts, half, n, seed, i);
        list_others(texts, half, n, texts + half);
        uint32_t passed = count_passed(task, texts, half, scratch);
        out->mean_passed += (double)passed / draws;
        out->refused += passed == 0;
        out->broken += passed > 0 && is_broken(task, passed - 1, texts + half, n - half, scratch);
    }
    free(texts);
    free(scratch);
    return KVB_OK;
}
