// From shares to tokens: kvb_budgets() and its summary; roundings are in budgets_round.c. Formulas: methods.md 2.7;
// kvpress step by step: lukv_press.py of kvpress 0.5.5, `compress`.
#include "budgets_round.h"
#include "fail.h"
#include "kvbudget.h"
#include "table.h"
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

// For tables whose rows are per cents.
static void look_up_per_cent(double ratio, kvb_lookup kind, kvb_mix *at)
{
    double percent = ratio * 100; // the very product that kvpress rounds
    if (kind == KVB_LOOKUP_NEAREST) {
        double row = rint(percent); // half to even in the default rounding mode, as Python's round
        at->row_below = at->row_above = row < 1 ? 1 : row > KVB_TABLE_ROWS ? KVB_TABLE_ROWS : (uint32_t)row;
        return;
    }
    if (fabs(percent - rint(percent)) < 1e-9) percent = rint(percent); // 0.29 * 100 is 28.999999999999996
    if (percent >= KVB_TABLE_ROWS) {
        at->row_below = at->row_above = KVB_TABLE_ROWS;
    } else {
        at->row_below = (uint32_t)percent;
        at->weight = percent - at->row_below;
        at->row_above = at->row_below + (at->weight > 0 || !at->row_below);
    }
}

// For tables whose rows are ratios of the user's choice. Of two equally near ones takes the lower, which keeps more.
static void look_up_ratio(const kvb_table *t, double ratio, kvb_lookup kind, kvb_mix *at)
{
    uint32_t n = t->info.n_rows, above = 0; // the first row beyond the ratio
    while (above < n && t->ratio[above] <= ratio) ++above;
    double low = above ? t->ratio[above - 1] : 0, high = above < n ? t->ratio[above] : low;
    if (kind == KVB_LOOKUP_NEAREST) {
        bool upper = above == 0 || (above < n && high - ratio < ratio - low);
        at->row_below = at->row_above = above + upper;
    } else {
        at->row_below = above;
        at->weight = above < n ? (ratio - low) / (high - low) : 0;
        at->row_above = above + (at->weight > 0);
    }
}

static kvb_mix look_up(const kvb_table *t, double ratio, kvb_lookup kind)
{
    size_t n_heads = (size_t)t->info.n_budgeted * t->info.n_kv_heads;
    kvb_mix at = {0};
    if (t->per_cent) look_up_per_cent(ratio, kind, &at);
    else look_up_ratio(t, ratio, kind, &at);
    at.below = at.row_below ? t->budgeted + (at.row_below - 1) * n_heads : NULL;
    at.above = t->budgeted + (at.row_above - 1) * n_heads;
    if (t->costs && at.weight != 0) {
        at.cost_below = at.row_below ? t->costs + (at.row_below - 1) * n_heads : NULL;
        at.cost_above = t->costs + (at.row_above - 1) * n_heads;
        at.cost = t->costs + (look_up(t, ratio, KVB_LOOKUP_NEAREST).row_above - 1) * n_heads;
    }
    return at;
}

// ---- tables with constraints ----

// Pages have the size that the table was solved for, which `block` must divide; without one, `block` is the page size.
static kvb_status round_limited(const kvb_table *t, const kvb_mix *at, uint32_t n_tokens, uint32_t block,
                                uint32_t least, uint32_t *keep, kvb_error *err)
{
    kvb_limits limits = t->limits; // shares its arrays
    if (block > 1 && limits.block == 1) {
        limits.block = block;
    } else if (block > 1 && limits.block % block != 0) {
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "kvb_budgets: block: expected a divisor of the %u tokens of a page that the table was solved "
                        "for, found %u; solve with --block %u",
                        (unsigned)limits.block, (unsigned)block, (unsigned)block);
    }
    return kvb_limits_round(&limits, kvb_mix_ideal, at, n_tokens, least, keep, err);
}

// ---- public ----

static uint32_t protected_tokens(const kvb_info *info, uint32_t n_tokens)
{
    uint64_t protection = (uint64_t)info->sink + info->window;
    return protection < n_tokens ? (uint32_t)protection : n_tokens;
}

static kvb_status check_arguments(const char *function, const kvb_table *t, double ratio, uint32_t n_tokens,
                                  const kvb_budget_options *opt, const uint32_t *keep, size_t cap, kvb_error *err)
{
    if (!t || !keep) return kvb_fail(err, KVB_ARGUMENT, "%s: table and keep must not be NULL", function);
    if (!(ratio < 1) || ratio < -DBL_MAX) {
        return kvb_fail(err, KVB_ARGUMENT, "%s: ratio: expected a prune ratio from 0 up to, not including, 1, found %g",
                        function, ratio);
    }
    if (n_tokens == 0) return kvb_fail(err, KVB_ARGUMENT, "%s: n_tokens: expected at least 1, found 0", function);
    if (opt && ((unsigned)opt->rounding > KVB_ROUND_GLOBAL_LR || (unsigned)opt->lookup > KVB_LOOKUP_LINEAR)) {
        return kvb_fail(err, KVB_ARGUMENT, "%s: options: unknown rounding %d or lookup %d", function,
                        (int)opt->rounding, (int)opt->lookup);
    }
    size_t n_heads = (size_t)t->info.n_layers * t->info.n_kv_heads;
    if (cap < n_heads) {
        return kvb_fail(err, KVB_CAPACITY, "%s: keep: expected room for %zu counts (n_layers * n_kv_heads), found %zu",
                        function, n_heads, cap);
    }
    return KVB_OK;
}

// The counts of layers with a budget stand side by side at the front of `keep`: moves them to their places. The other
// layers keep all tokens.
static void spread_layers(const kvb_info *info, uint32_t n_tokens, uint32_t *keep)
{
    size_t heads = info->n_kv_heads;
    uint32_t from = info->n_budgeted;
    if (!info->bounded) return;
    for (uint32_t l = info->n_layers; l-- > 0;) {
        if (!info->bounded[l]) memmove(keep + l * heads, keep + --from * heads, heads * sizeof *keep);
        for (size_t g = 0; info->bounded[l] && g < heads; g++) keep[l * heads + g] = n_tokens;
    }
}

// Does what kvb_budgets() does for the layers with a budget; their counts stand side by side.
static kvb_status round_budgets(const kvb_table *table, double ratio, uint32_t n_tokens, const kvb_budget_options *opt,
                                uint32_t *keep, kvb_error *err)
{
    uint32_t n_layers = table->info.n_budgeted, n_kv_heads = table->info.n_kv_heads;
    size_t n_heads = (size_t)n_layers * n_kv_heads;
    if (ratio <= 0) {
        for (size_t h = 0; h < n_heads; h++) keep[h] = n_tokens;
        return KVB_OK;
    }
    kvb_mix at = look_up(table, ratio, opt->lookup);
    uint32_t least = opt->strict ? protected_tokens(&table->info, n_tokens) : 1;
    least = least ? least : 1;
    if (table->limited) return round_limited(table, &at, n_tokens, opt->block, least, keep, err);
    switch (opt->rounding) {
    case KVB_ROUND_LAYER_LR:
        for (uint32_t l = 0; l < n_layers; l++)
            kvb_round_layer(&at, (size_t)l * n_kv_heads, n_kv_heads, n_tokens, keep + (size_t)l * n_kv_heads);
        break;
    case KVB_ROUND_FLOOR:
        kvb_round_floor(&at, n_heads, n_tokens, keep);
        break;
    case KVB_ROUND_GLOBAL_LR:
        kvb_round_global(&at, n_heads, n_tokens, keep);
        break;
    }
    if (opt->block > 1)
        kvb_round_blocks(keep, n_heads, n_tokens, opt->block, least / opt->block + (least % opt->block != 0));
    else if (opt->strict) kvb_raise_to_floor(keep, n_heads, least);
    return KVB_OK;
}

kvb_status kvb_budgets(const kvb_table *table, double ratio, uint32_t n_tokens, const kvb_budget_options *opt,
                       uint32_t *keep, size_t cap, kvb_error *err)
{
    const kvb_budget_options defaults = {KVB_ROUND_LAYER_LR, KVB_LOOKUP_NEAREST, 0, 0};
    kvb_status status = check_arguments("kvb_budgets", table, ratio, n_tokens, opt, keep, cap, err);
    if (status) return status;
    status = round_budgets(table, ratio, n_tokens, opt ? opt : &defaults, keep, err);
    if (!status) spread_layers(&table->info, n_tokens, keep);
    return status;
}

int kvb_table_has_formats(const kvb_table *table)
{
    return table && table->formats != NULL;
}

kvb_status kvb_formats(const kvb_table *table, double ratio, uint8_t *formats, size_t cap, kvb_error *err)
{
    if (!table || !formats) return kvb_fail(err, KVB_ARGUMENT, "kvb_formats: table and formats must not be NULL");
    size_t n = (size_t)table->info.n_layers * table->info.n_kv_heads * 2;
    if (!(ratio < 1) || ratio < -DBL_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "kvb_formats: ratio: expected 0 up to, not including, 1, found %g", ratio);
    if (cap < n) return kvb_fail(err, KVB_CAPACITY, "kvb_formats: expected room for %zu formats, found %zu", n, cap);
    memset(formats, KVB_PACK_BF16, n);
    if (table->formats && ratio > 0)
        memcpy(formats, table->formats + (look_up(table, ratio, KVB_LOOKUP_NEAREST).row_above - 1) * n, n);
    return KVB_OK;
}

static unsigned table_warnings(const kvb_table *t, double ratio, uint32_t n_tokens, kvb_lookup kind, const kvb_mix *at)
{
    const kvb_info *info = &t->info;
    uint32_t shortest = UINT32_MAX, longest = 0;
    double last = t->per_cent ? 0.99 : t->ratio[info->n_rows - 1];
    double row = t->per_cent ? at->row_above / 100.0 : t->ratio[at->row_above - 1];
    double covered = kind == KVB_LOOKUP_LINEAR ? (ratio < last ? ratio : last) : row;
    unsigned warnings = 0;
    if ((at->below && at->weight < 1 && t->saturated[at->row_below - 1]) ||
        (at->weight > 0 && t->saturated[at->row_above - 1]))
        warnings |= KVB_WARN_SATURATED;
    for (uint32_t i = 0; i < info->n_calibration_tokens; i++) {
        uint32_t tokens = info->calibration_tokens[i];
        shortest = tokens < shortest ? tokens : shortest;
        longest = tokens > longest ? tokens : longest;
    }
    if ((uint64_t)n_tokens * 2 < shortest || n_tokens > (uint64_t)longest * 2) warnings |= KVB_WARN_LENGTH;
    if (fabs(covered - ratio) > 0.005 + 1e-9) warnings |= KVB_WARN_CLAMPED;
    return warnings;
}

kvb_status kvb_budgets_summarize(const kvb_table *table, double ratio, uint32_t n_tokens, const kvb_budget_options *opt,
                                 const uint32_t *keep, size_t cap, kvb_budget_summary *out, kvb_error *err)
{
    kvb_status status = check_arguments("kvb_budgets_summarize", table, ratio, n_tokens, opt, keep, cap, err);
    if (status || !out)
        return status ? status : kvb_fail(err, KVB_ARGUMENT, "kvb_budgets_summarize: out must not be NULL");
    const kvb_info *info = &table->info;
    size_t n_heads = (size_t)info->n_layers * info->n_kv_heads,
           n_budgeted = (size_t)info->n_budgeted * info->n_kv_heads;
    uint32_t protection = protected_tokens(info, n_tokens);
    kvb_budget_summary sum = {0};
    sum.requested_ratio = ratio;
    sum.keep_min = UINT32_MAX;
    for (size_t h = 0; h < n_heads; h++) {
        if (info->bounded && info->bounded[h / info->n_kv_heads]) continue;
        sum.total += keep[h];
        sum.keep_min = keep[h] < sum.keep_min ? keep[h] : sum.keep_min;
        sum.keep_max = keep[h] > sum.keep_max ? keep[h] : sum.keep_max;
        sum.heads_below_protected += keep[h] < protection;
    }
    sum.effective_ratio = 1 - (double)sum.total / ((double)n_budgeted * n_tokens);
    if (ratio > 0) {
        kvb_lookup kind = opt ? opt->lookup : KVB_LOOKUP_NEAREST;
        kvb_mix at = look_up(table, ratio, kind);
        sum.row_below = at.row_below;
        sum.row_above = at.row_above;
        sum.weight = at.weight;
        sum.warnings = table_warnings(table, ratio, n_tokens, kind, &at);
    }
    if (!table->formats && fabs(sum.effective_ratio - (ratio > 0 ? ratio : 0)) > 0.01)
        sum.warnings |= KVB_WARN_EFFECTIVE;
    sum.warnings |= sum.heads_below_protected ? (unsigned)KVB_WARN_PROTECTED : 0u;
    *out = sum;
    return KVB_OK;
}
