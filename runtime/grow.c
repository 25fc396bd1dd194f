// When a growing cache is cut, to how many rows, and what stays: the rule of kvb_growth.
#include "fail.h"
#include "kvbudget.h"
#include <float.h>

enum { DEFAULT_INTERVAL = 128 };

static kvb_status check_counts(const kvb_table *table, const kvb_growth *g, kvb_error *err)
{
    if (!g->target_size && (!(g->ratio < 1) || g->ratio < -DBL_MAX))
        return kvb_fail(err, KVB_ARGUMENT, "ratio: expected a prune ratio from 0 up to, not including, 1, found %g",
                        g->ratio);
    if (g->target_size && kvb_table_has_formats(table))
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "target_size: counts tokens, and this table shares out bytes; give a ratio, and an interval "
                        "for long answers");
    if (g->target_size && g->target_size <= g->least)
        return kvb_fail(err, KVB_ARGUMENT, "target_size: expected at least %lu, found %u", (unsigned long)g->least + 1,
                        (unsigned)g->target_size);
    if (g->buffer && !g->interval)
        return kvb_fail(err, KVB_ARGUMENT, "buffer: needs an interval, which says when it is full");
    if (g->buffer && g->buffer < g->interval)
        return kvb_fail(err, KVB_ARGUMENT, "buffer: expected at least %u, found %u", (unsigned)g->interval,
                        (unsigned)g->buffer);
    return KVB_OK;
}

kvb_status kvb_growth_check(const kvb_table *table, kvb_growth *growth, kvb_error *err)
{
    if (!table || !growth) return kvb_fail(err, KVB_ARGUMENT, "kvb_growth_check: table and growth must not be NULL");
    const kvb_info *info = kvb_table_info(table);
    kvb_growth g = *growth;
    if (g.least < (uint64_t)info->sink + info->window) g.least = info->sink + info->window;
    if (g.target_size && !g.interval) g.interval = DEFAULT_INTERVAL;
    kvb_status status = check_counts(table, &g, err);
    if (status != KVB_OK) return status;
    if (!g.buffer) g.buffer = g.interval;
    g.sink = info->sink;
    g.window = info->window + (g.buffer - g.interval);
    *growth = g;
    return KVB_OK;
}

int kvb_growth_due(const kvb_growth *g, uint32_t n_tokens, uint32_t cut_at, int turn_ends)
{
    if (!g) return 0;
    return g->interval ? n_tokens > cut_at && n_tokens - cut_at >= g->interval : turn_ends != 0;
}

static kvb_status budgets_for(const kvb_table *table, double ratio, uint32_t n_tokens, const kvb_budget_options *opt,
                              uint32_t *keep, size_t cap, kvb_budget_summary *sum, kvb_error *err)
{
    kvb_status status = kvb_budgets(table, ratio, n_tokens, opt, keep, cap, err);
    return status ? status : kvb_budgets_summarize(table, ratio, n_tokens, opt, keep, cap, sum, err);
}

kvb_status kvb_growth_budgets(const kvb_table *table, const kvb_growth *g, uint32_t n_tokens, uint32_t cut_at,
                              uint32_t *keep, size_t cap, kvb_budget_summary *out, kvb_error *err)
{
    if (!table || !g || !keep)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_growth_budgets: table, growth and keep must not be NULL");
    if (g->buffer < g->interval)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_growth_budgets: call kvb_growth_check() first");
    const kvb_info *info = kvb_table_info(table);
    kvb_budget_options opt = g->options;
    kvb_budget_summary sum;
    uint32_t hold = g->buffer - g->interval, least = g->least > g->target_size ? g->least : g->target_size;
    if (n_tokens <= (uint64_t)least + hold) { // all of it stays
        kvb_status status = budgets_for(table, 0, n_tokens, &opt, keep, cap, &sum, err);
        if (status == KVB_OK && out) *out = sum;
        return status;
    }
    uint32_t n = n_tokens - hold;
    double ratio = g->target_size ? 1 - (double)g->target_size / n : g->ratio;
    if (g->target_size) opt.lookup = KVB_LOOKUP_LINEAR;
    opt.strict |= !g->loose && (cut_at || g->interval);
    kvb_status status = budgets_for(table, ratio, n, &opt, keep, cap, &sum, err);
    uint64_t wanted = (uint64_t)g->target_size * info->n_budgeted * info->n_kv_heads;
    while (status == KVB_OK && wanted && sum.total > wanted) { // the last rows prune less than that
        uint32_t less = (uint32_t)((double)n * (double)wanted / (double)sum.total);
        n = less < n ? less : n - 1;
        status = budgets_for(table, ratio, n, &opt, keep, cap, &sum, err);
    }
    if (status != KVB_OK) return status;
    for (size_t h = 0; h < (size_t)info->n_layers * info->n_kv_heads; h++) keep[h] += hold;
    if (out) *out = sum;
    return KVB_OK;
}
