// From shares to tokens: kvb_budgets() and its summary. Formulas: methods.md 2.7; kvpress step by step: lukv_press.py
// of kvpress 0.5.5, `compress`.
#include "fail.h"
#include "kvbudget.h"
#include "table.h"
#include "torch_topk.h"
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

// Products that are floored must be rounded to a double or a float first. Compilers may fuse a product with a later
// sum (GCC does so by default where the machine can), and then two machines would hand out different budgets. A call
// that is not inlined keeps them apart, whatever flags this file is compiled with.
#if defined(__GNUC__)
#define ROUNDED_RESULT __attribute__((noinline))
#else
#define ROUNDED_RESULT
#endif

// The prune ratios in use: (1 - weight) * below + weight * above. `below` is NULL for ratio 0, where all r are 0.
typedef struct lookup {
    const double *below, *above;   // [L, G] rows of the table
    uint32_t row_below, row_above; // their numbers from 1 on, which in most tables are per cents; 0: nothing is pruned
    double weight;
} lookup;

// Rows are per cents.
static void look_up_per_cent(double ratio, kvb_lookup kind, lookup *at)
{
    double percent = ratio * 100; // the very product that kvpress rounds
    if (kind == KVB_LOOKUP_NEAREST) {
        double row = rint(percent); // half to even in the default rounding mode, as Python's round
        at->row_below = at->row_above = row < 1 ? 1 : row > KVB_TABLE_ROWS ? KVB_TABLE_ROWS : (uint32_t)row;
    } else if (percent >= KVB_TABLE_ROWS) {
        at->row_below = at->row_above = KVB_TABLE_ROWS;
    } else {
        at->row_below = (uint32_t)percent;
        at->row_above = at->row_below + 1;
        at->weight = percent - at->row_below;
    }
}

// Rows are ratios of the user's choice. Of two equally near ones the lower ratio serves, which keeps more.
static void look_up_ratio(const kvb_table *t, double ratio, kvb_lookup kind, lookup *at)
{
    uint32_t n = t->info.n_rows, above = 0; // the first row beyond the ratio
    while (above < n && t->ratio[above] <= ratio) ++above;
    double low = above ? t->ratio[above - 1] : 0, high = above < n ? t->ratio[above] : low;
    if (kind == KVB_LOOKUP_NEAREST) {
        bool upper = above == 0 || (above < n && high - ratio < ratio - low);
        at->row_below = at->row_above = above + upper;
    } else {
        at->row_below = above;
        at->row_above = above < n ? above + 1 : n;
        at->weight = above < n ? (ratio - low) / (high - low) : 0;
    }
}

static lookup look_up(const kvb_table *t, double ratio, kvb_lookup kind)
{
    size_t n_heads = (size_t)t->info.n_layers * t->info.n_kv_heads;
    lookup at = {NULL, NULL, 0, 0, 0};
    if (t->per_cent) look_up_per_cent(ratio, kind, &at);
    else look_up_ratio(t, ratio, kind, &at);
    at.below = at.row_below ? t->prune_ratio + (at.row_below - 1) * n_heads : NULL;
    at.above = t->prune_ratio + (at.row_above - 1) * n_heads;
    return at;
}

static double prune_at(const lookup *at, size_t head)
{
    double below = at->below ? at->below[head] : 0;
    // fma by name gives one rounding everywhere, where a + w * d may be one or two
    return at->weight == 0 ? below : fma(at->weight, at->above[head] - below, below);
}

// ---- layer_lr ----

// kvpress's `ideal_keep_counts`: everything in float32.
static ROUNDED_RESULT void ideal_f32(const lookup *at, size_t first_head, uint32_t n, uint32_t n_tokens, float *ideal)
{
    for (uint32_t g = 0; g < n; g++) {
        float rate = 1.0f - (float)prune_at(at, first_head + g);
        rate = rate < 0 ? 0 : rate > 1 ? 1 : rate;
        ideal[g] = rate * (float)n_tokens;
    }
}

static void round_layer(const lookup *at, size_t first_head, uint32_t n, uint32_t n_tokens, uint32_t *keep)
{
    float ideal[KVB_MAX_KV_HEADS];
    kvb_topk_item fraction[KVB_MAX_KV_HEADS];
    int64_t most = (int64_t)n * n_tokens, base = 0, total, left;

    ideal_f32(at, first_head, n, n_tokens, ideal);
    total = (int64_t)rintf(kvb_torch_sum(ideal, n));
    total = total < n ? n : total > most ? most : total;
    for (uint32_t g = 0; g < n; g++) {
        float whole = floorf(ideal[g]);
        fraction[g].value = ideal[g] - whole;
        fraction[g].index = g;
        keep[g] = whole < (float)n_tokens ? (uint32_t)whole : n_tokens;
        base += (int64_t)whole;
    }
    left = total - base;
    if (left > 0) {
        size_t k = left < n ? (size_t)left : n;
        kvb_torch_topk(fraction, n, k);
        for (size_t i = 0; i < k; i++) keep[fraction[i].index] += keep[fraction[i].index] < n_tokens;
    }
    for (uint32_t g = 0; g < n; g++)
        keep[g] = keep[g] ? keep[g] : 1; // after the remainders, so the layer's sum may exceed `total`: as kvpress
}

// ---- selecting the largest remainders of the whole model without room for a sorted copy ----

typedef struct remainders remainders;
struct remainders {
    uint64_t (*key)(const remainders *self, size_t head); // larger = served earlier
    const lookup *at;
    const uint32_t *keep;
    uint32_t n_tokens, block;
};

// The k-th largest key of n, 1 <= k <= n, and how many heads with exactly that key are among the first k. Radix
// select: a histogram of 8 bits at a time narrows the prefix of the wanted key, eight passes in all.
static uint64_t kth_largest(const remainders *r, size_t n, size_t k, size_t *ties)
{
    uint64_t prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        size_t histogram[256] = {0};
        unsigned digit = 255;
        for (size_t h = 0; h < n; h++) {
            uint64_t key = r->key(r, h);
            if (shift == 56 || key >> (shift + 8) == prefix) ++histogram[key >> shift & 255];
        }
        for (; k > histogram[digit]; --digit) k -= histogram[digit];
        prefix = prefix << 8 | digit;
    }
    *ties = k;
    return prefix;
}

// ---- floor and global_lr ----

static ROUNDED_RESULT double ideal_f64(const lookup *at, size_t head, uint32_t n_tokens)
{
    return (1 - prune_at(at, head)) * n_tokens;
}

static uint64_t fraction_key(const remainders *r, size_t head)
{
    double ideal = ideal_f64(r->at, head, r->n_tokens);
    double fraction = ideal - floor(ideal); // exact, and not negative: so its bits are ordered like its value
    uint64_t bits;
    memcpy(&bits, &fraction, sizeof bits);
    return bits;
}

static void round_floor(const lookup *at, size_t n_heads, uint32_t n_tokens, uint32_t *keep)
{
    for (size_t h = 0; h < n_heads; h++) {
        double ideal = ideal_f64(at, h, n_tokens), up = ceil(ideal);
        double whole = up - ideal < 1e-6 ? up : floor(ideal);
        keep[h] = whole < 1 ? 1 : (uint32_t)whole;
    }
}

// Raises every count to `floor`. What is missing is taken one by one from the count that is highest above the floor
// (tie: lower index). Done at once: find the level to which the highest are worn down, then take the odd ones by
// index.
static void raise_to_floor(uint32_t *count, size_t n, uint32_t floor_count)
{
    uint64_t missing = 0, surplus = 0, taken = 0;
    uint32_t low = 0, high = 0; // the level, counted above the floor
    for (size_t h = 0; h < n; h++) {
        if (count[h] < floor_count) {
            missing += floor_count - count[h];
            count[h] = floor_count;
        } else {
            surplus += count[h] - floor_count;
            high = count[h] - floor_count > high ? count[h] - floor_count : high;
        }
    }
    missing = missing < surplus ? missing : surplus; // too little: all end at the floor and the total grows
    if (missing == 0) return;
    while (low < high) { // smallest level that costs no more than `missing`
        uint32_t level = low + (high - low) / 2;
        uint64_t cost = 0;
        for (size_t h = 0; h < n; h++) {
            uint32_t above = count[h] - floor_count;
            cost += above > level ? above - level : 0;
        }
        if (cost <= missing) {
            high = level;
            taken = cost;
        } else {
            low = level + 1;
        }
    }
    missing -= taken;
    for (size_t h = 0; h < n; h++) {
        if (count[h] - floor_count >= high) {
            count[h] = floor_count + high;
            if (missing > 0 && high > 0) {
                --count[h];
                --missing;
            }
        }
    }
}

static void round_global(const lookup *at, size_t n_heads, uint32_t n_tokens, uint32_t *keep)
{
    remainders r = {fraction_key, at, keep, n_tokens, 0};
    double sum = 0;
    uint64_t base = 0, total, most = (uint64_t)n_heads * n_tokens;
    for (size_t h = 0; h < n_heads; h++) {
        double ideal = ideal_f64(at, h, n_tokens);
        keep[h] = (uint32_t)floor(ideal);
        base += keep[h];
        sum += ideal;
    }
    sum = rint(sum);
    total = sum < (double)n_heads ? n_heads : sum > (double)most ? most : (uint64_t)sum;
    if (total > base) {
        size_t k = total - base < n_heads ? (size_t)(total - base) : n_heads, ties;
        uint64_t threshold = kth_largest(&r, n_heads, k, &ties);
        for (size_t h = 0; h < n_heads; h++) {
            uint64_t key = fraction_key(&r, h);
            bool take = key > threshold || (key == threshold && ties > 0);
            ties -= take && key == threshold;
            keep[h] += take && keep[h] < n_tokens;
        }
    }
    raise_to_floor(keep, n_heads, 1);
}

// ---- blocks ----

static uint64_t block_key(const remainders *r, size_t head)
{
    return r->keep[head] % r->block;
}

static void round_blocks(uint32_t *keep, size_t n_heads, uint32_t n_tokens, uint32_t block, uint32_t least_blocks)
{
    remainders r = {block_key, NULL, keep, n_tokens, block};
    uint64_t total = 0, whole = 0, wanted, threshold = UINT64_MAX;
    size_t ties = 0;
    for (size_t h = 0; h < n_heads; h++) {
        total += keep[h];
        whole += keep[h] / block;
    }
    wanted = total / block + (total % block >= block - total % block); // half up
    if (wanted > whole) // at most as many as there are heads with a remainder
        threshold = kth_largest(&r, n_heads, (size_t)(wanted - whole), &ties);
    for (size_t h = 0; h < n_heads; h++) {
        uint64_t key = block_key(&r, h);
        bool take = key > threshold || (key == threshold && ties > 0);
        ties -= take && key == threshold;
        keep[h] = keep[h] / block + take;
    }
    raise_to_floor(keep, n_heads, least_blocks);
    for (size_t h = 0; h < n_heads; h++) {
        uint64_t tokens = (uint64_t)keep[h] * block;
        keep[h] = tokens < n_tokens ? (uint32_t)tokens : n_tokens;
    }
}

// ---- tables with constraints ----

static double ideal_of_lookup(const void *self, size_t head, uint32_t n_tokens)
{
    return ideal_f64(self, head, n_tokens);
}

// The table's own pages win; the caller's are used when the table has none, or when they divide the table's.
static kvb_status round_limited(const kvb_table *t, const lookup *at, uint32_t n_tokens, uint32_t block, uint32_t least,
                                uint32_t *keep, kvb_error *err)
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
    return kvb_limits_round(&limits, ideal_of_lookup, at, n_tokens, least, keep, err);
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

kvb_status kvb_budgets(const kvb_table *table, double ratio, uint32_t n_tokens, const kvb_budget_options *opt,
                       uint32_t *keep, size_t cap, kvb_error *err)
{
    const kvb_budget_options defaults = {KVB_ROUND_LAYER_LR, KVB_LOOKUP_NEAREST, 0, 0};
    kvb_status status = check_arguments("kvb_budgets", table, ratio, n_tokens, opt, keep, cap, err);
    if (status) return status;
    opt = opt ? opt : &defaults;
    uint32_t n_layers = table->info.n_layers, n_kv_heads = table->info.n_kv_heads;
    size_t n_heads = (size_t)n_layers * n_kv_heads;
    if (ratio <= 0) {
        for (size_t h = 0; h < n_heads; h++) keep[h] = n_tokens;
        return KVB_OK;
    }
    lookup at = look_up(table, ratio, opt->lookup);
    uint32_t least = opt->strict ? protected_tokens(&table->info, n_tokens) : 1;
    least = least ? least : 1;
    if (table->limited) return round_limited(table, &at, n_tokens, opt->block, least, keep, err);
    switch (opt->rounding) {
    case KVB_ROUND_LAYER_LR:
        for (uint32_t l = 0; l < n_layers; l++)
            round_layer(&at, (size_t)l * n_kv_heads, n_kv_heads, n_tokens, keep + (size_t)l * n_kv_heads);
        break;
    case KVB_ROUND_FLOOR:
        round_floor(&at, n_heads, n_tokens, keep);
        break;
    case KVB_ROUND_GLOBAL_LR:
        round_global(&at, n_heads, n_tokens, keep);
        break;
    }
    if (opt->block > 1)
        round_blocks(keep, n_heads, n_tokens, opt->block, least / opt->block + (least % opt->block != 0));
    else if (opt->strict) raise_to_floor(keep, n_heads, least);
    return KVB_OK;
}

static unsigned table_warnings(const kvb_table *t, double ratio, uint32_t n_tokens, kvb_lookup kind, const lookup *at)
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
    size_t n_heads = (size_t)table->info.n_layers * table->info.n_kv_heads;
    uint32_t protection = protected_tokens(&table->info, n_tokens);
    kvb_budget_summary sum = {0};
    sum.requested_ratio = ratio;
    sum.keep_min = UINT32_MAX;
    for (size_t h = 0; h < n_heads; h++) {
        sum.total += keep[h];
        sum.keep_min = keep[h] < sum.keep_min ? keep[h] : sum.keep_min;
        sum.keep_max = keep[h] > sum.keep_max ? keep[h] : sum.keep_max;
        sum.heads_below_protected += keep[h] < protection;
    }
    sum.effective_ratio = 1 - (double)sum.total / ((double)n_heads * n_tokens);
    if (ratio > 0) {
        kvb_lookup kind = opt ? opt->lookup : KVB_LOOKUP_NEAREST;
        lookup at = look_up(table, ratio, kind);
        sum.row_below = at.row_below;
        sum.row_above = at.row_above;
        sum.weight = at.weight;
        sum.warnings = table_warnings(table, ratio, n_tokens, kind, &at);
    }
    if (fabs(sum.effective_ratio - (ratio > 0 ? ratio : 0)) > 0.01) sum.warnings |= KVB_WARN_EFFECTIVE;
    sum.warnings |= sum.heads_below_protected ? (unsigned)KVB_WARN_PROTECTED : 0u;
    *out = sum;
    return KVB_OK;
}
