// Constraints of engines: making and reading them, what they mean in tokens, and rounding that keeps to them.
#include "limits.h"
#include "fail.h"
#include "json.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- making ----

kvb_status kvb_limits_init(kvb_limits *m, uint32_t n_layers, uint32_t n_kv_heads, kvb_error *err)
{
    size_t n = (size_t)n_layers * n_kv_heads;
    *m = (kvb_limits){.n_layers = n_layers, .n_kv_heads = n_kv_heads, .block = 1, .ranks = 1};
    m->least = calloc(n, sizeof *m->least);
    m->most = calloc(n, sizeof *m->most);
    m->cap = calloc(n_layers, sizeof *m->cap);
    if (!m->least || !m->most || !m->cap) {
        kvb_limits_free(m);
        return kvb_fail(err, KVB_MEMORY, "constraints: not enough memory for %zu heads", n);
    }
    for (size_t h = 0; h < n; h++) m->most[h] = 1;
    for (uint32_t l = 0; l < n_layers; l++) m->cap[l] = 1;
    return KVB_OK;
}

void kvb_limits_free(kvb_limits *m)
{
    free(m->least);
    free(m->most);
    free(m->cap);
    *m = (kvb_limits){0};
}

static kvb_status read_count(const cJSON *item, const char *name, uint32_t least, uint32_t *out, kvb_error *err)
{
    double value = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (!(value >= least && value <= 1 << 24) || value != floor(value)) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"constraints\": %s: expected a whole number from %u to 2^24",
                        name, item->string, (unsigned)least);
    }
    *out = (uint32_t)value;
    return KVB_OK;
}

static kvb_status read_shares(const cJSON *item, const char *name, size_t count, double *out, kvb_error *err)
{
    size_t i = 0;
    const cJSON *element;
    if (!cJSON_IsArray(item) || (size_t)cJSON_GetArraySize(item) != count) {
        return kvb_fail(err, KVB_FORMAT, "%s: metadata \"constraints\": %s: expected an array of %zu shares", name,
                        item->string, count);
    }
    cJSON_ArrayForEach(element, item)
    {
        double share = cJSON_IsNumber(element) ? element->valuedouble : -1;
        if (!(share >= 0 && share <= 1)) {
            return kvb_fail(err, KVB_FORMAT,
                            "%s: metadata \"constraints\": %s: element %zu: expected a share from 0 to 1", name,
                            item->string, i);
        }
        out[i++] = share;
    }
    return KVB_OK;
}

static kvb_status read_item(kvb_limits *m, const cJSON *item, const char *name, kvb_error *err)
{
    size_t n = (size_t)m->n_layers * m->n_kv_heads;
    const char *key = item->string;
    if (strcmp(key, "block") == 0) return read_count(item, name, 1, &m->block, err);
    if (strcmp(key, "levels") == 0) return read_count(item, name, 0, &m->levels, err);
    if (strcmp(key, "ranks") == 0) return read_count(item, name, 1, &m->ranks, err);
    if (strcmp(key, "by_layer") == 0 && cJSON_IsBool(item)) {
        m->by_layer = cJSON_IsTrue(item);
        return KVB_OK;
    }
    if (strcmp(key, "least") == 0) return read_shares(item, name, n, m->least, err);
    if (strcmp(key, "most") == 0) return read_shares(item, name, n, m->most, err);
    if (strcmp(key, "layer_cap") == 0) return read_shares(item, name, m->n_layers, m->cap, err);
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s: metadata \"constraints\": \"%.40s\" is not known to this version; use a newer kvbudget", name,
                    key);
}

kvb_status kvb_limits_parse(kvb_limits *m, const char *text, uint32_t n_layers, uint32_t n_kv_heads, const char *name,
                            kvb_error *err)
{
    cJSON *all;
    const cJSON *item;
    kvb_status status = kvb_limits_init(m, n_layers, n_kv_heads, NULL);
    if (status) return kvb_fail(err, status, "%s: not enough memory for the constraints", name);
    status = kvb_json_object(&all, text, strlen(text), name, "metadata \"constraints\"", err);
    cJSON_ArrayForEach(item, all)
    {
        if (!status) status = read_item(m, item, name, err);
    }
    if (!status) {
        kvb_error inner;
        if (kvb_limits_check(m, &inner))
            status = kvb_fail(err, KVB_FORMAT, "%s: metadata \"constraints\": %s", name, inner.message);
    }
    cJSON_Delete(all);
    if (status) kvb_limits_free(m);
    return status;
}

// ---- meaning ----

kvb_status kvb_limits_check(const kvb_limits *m, kvb_error *err)
{
    if (m->n_kv_heads % m->ranks != 0) {
        return kvb_fail(err, KVB_ARGUMENT, "%u ranks: expected a divisor of the %u KV heads of a layer",
                        (unsigned)m->ranks, (unsigned)m->n_kv_heads);
    }
    if (m->levels && m->ranks > 1) {
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "equal totals of %u ranks and at most %u budgets per layer cannot be combined: few budgets "
                        "rarely add up to equal totals; choose one of the two",
                        (unsigned)m->ranks, (unsigned)m->levels);
    }
    for (uint32_t l = 0; l < m->n_layers; l++) {
        for (uint32_t p = 0; p < m->ranks; p++) {
            uint32_t own = m->n_kv_heads / m->ranks;
            size_t first = (size_t)l * m->n_kv_heads + (size_t)p * own;
            double least = 0;
            for (size_t h = first; h < first + own; h++) {
                least += m->least[h];
                if (m->least[h] > m->most[h]) {
                    return kvb_fail(err, KVB_ARGUMENT,
                                    "layer %u, KV head %zu: must keep at least %g and at most %g of its tokens",
                                    (unsigned)l, h % m->n_kv_heads, m->least[h], m->most[h]);
                }
            }
            if (least > m->cap[l] * own + 1e-9) {
                return kvb_fail(err, KVB_ARGUMENT,
                                "layer %u: its heads must keep at least %g of their tokens, but its cap is %g",
                                (unsigned)l, least / own, m->cap[l]);
            }
        }
    }
    return KVB_OK;
}

uint32_t kvb_limits_units(const kvb_limits *m, uint32_t n_tokens)
{
    return n_tokens / m->block + (n_tokens % m->block != 0);
}

uint32_t kvb_limits_least(const kvb_limits *m, size_t head, uint32_t n_tokens)
{
    double units = ceil((m->least[head] * n_tokens - KVB_LIMITS_GRACE) / m->block);
    uint32_t all = kvb_limits_units(m, n_tokens);
    return units < 1 ? 1 : units < all ? (uint32_t)units : all;
}

uint32_t kvb_limits_most(const kvb_limits *m, size_t head, uint32_t n_tokens)
{
    uint32_t all = kvb_limits_units(m, n_tokens);
    return m->most[head] >= 1 ? all : (uint32_t)floor((m->most[head] * n_tokens + KVB_LIMITS_GRACE) / m->block);
}

uint64_t kvb_limits_cap(const kvb_limits *m, uint32_t layer, uint32_t n_tokens)
{
    uint64_t own = m->n_kv_heads / m->ranks;
    if (m->cap[layer] >= 1) return own * kvb_limits_units(m, n_tokens);
    return (uint64_t)floor((m->cap[layer] * (double)own * n_tokens + KVB_LIMITS_GRACE) / m->block);
}

// ---- Whole tokens, or pages, within all limits of a table ----

// One call of kvb_limits_round().
typedef struct rounding {
    const kvb_limits *m;
    kvb_ideal *ideal;
    const void *self;
    uint32_t n_tokens, units, floor_units; // floor_units: the caller's least_tokens
    uint32_t own;                          // heads of a part: one rank's heads of one layer
    uint32_t *keep;
} rounding;

// One of those that share a total: `weight` heads that all get the same number of units, from lo to hi; each should get
// `ideal`.
typedef struct share {
    double ideal;
    uint64_t lo, hi, weight;
} share;

// Returns share i of a total: group i of a part, or a rank's part of layer i.
typedef share get_share(const void *from, size_t i);

static uint64_t shifted(const share *s, double shift)
{
    double units = floor(s->ideal + shift);
    return units < (double)s->lo ? s->lo : units > (double)s->hi ? s->hi : (uint64_t)units;
}

static uint64_t shifted_sum(get_share *get, const void *from, size_t n, double shift)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        share s = get(from, i);
        sum += s.weight * shifted(&s, shift);
    }
    return sum;
}

// Finds the shift of all ideals that meets `total`, or the nearest two around it, between which the remainders lie.
static void find_shift(get_share *get, const void *from, size_t n, uint64_t total, double range, double *low,
                       double *high)
{
    uint64_t sum = shifted_sum(get, from, n, 0);
    double step = 1; // most shifts are shares of a unit
    *low = *high = 0;
    while (sum <= total && *high < range) {
        *low = *high;
        *high += step;
        step *= 8;
        sum = shifted_sum(get, from, n, *high);
    }
    for (step = 1; shifted_sum(get, from, n, *low) > total && *low > -range; step *= 8) {
        *high = *low;
        *low -= step;
    }
    // Ideals have errors of about 1e-11 units; a smaller step would tell noise apart, not remainders.
    while (*high - *low > 1e-9) {
        double middle = *low + (*high - *low) / 2;
        if (!(middle > *low && middle < *high)) break; // no double lies between large shifts
        sum = shifted_sum(get, from, n, middle);
        if (sum <= total) *low = middle;
        else *high = middle;
        if (sum == total) *high = middle;
    }
}

// Computes one head's limits and ideal, in units. Returns false if the limits exclude each other.
static bool head_share(const rounding *r, size_t head, share *out)
{
    double tokens = r->ideal(r->self, head, r->n_tokens);
    uint32_t least = kvb_limits_least(r->m, head, r->n_tokens);
    out->ideal = tokens > r->n_tokens - KVB_LIMITS_GRACE ? r->units : tokens / r->m->block;
    out->lo = least > r->floor_units ? least : r->floor_units;
    out->hi = kvb_limits_most(r->m, head, r->n_tokens);
    out->weight = 1;
    return out->lo <= out->hi;
}

static size_t first_head(const rounding *r, uint32_t layer, uint32_t rank)
{
    return (size_t)layer * r->m->n_kv_heads + (size_t)rank * r->own;
}

// Sums up a part. Limits of heads that exclude each other have been reported before.
static share part_share(const rounding *r, uint32_t layer, uint32_t rank)
{
    size_t first = first_head(r, layer, rank);
    uint64_t cap = kvb_limits_cap(r->m, layer, r->n_tokens);
    share sum = {0, 0, 0, 1}, s;
    for (size_t h = first; h < first + r->own; h++) {
        head_share(r, h, &s);
        sum.ideal += s.ideal;
        sum.lo += s.lo;
        sum.hi += s.hi;
    }
    sum.hi = sum.hi < cap ? sum.hi : cap;
    return sum;
}

static kvb_status check_parts(const rounding *r, kvb_error *err)
{
    for (uint32_t l = 0; l < r->m->n_layers; l++) {
        for (uint32_t h = 0; h < r->m->n_kv_heads; h++) {
            share s;
            if (!head_share(r, first_head(r, l, 0) + h, &s)) {
                return kvb_fail(
                    err, KVB_UNSUPPORTED,
                    "constraints: layer %u, KV head %u: at %u tokens, in pages of %u, it must keep at least "
                    "%llu pages and at most %llu; nothing fits",
                    (unsigned)l, (unsigned)h, (unsigned)r->n_tokens, (unsigned)r->m->block, (unsigned long long)s.lo,
                    (unsigned long long)s.hi);
            }
        }
        for (uint32_t p = 0; p < r->m->ranks; p++) {
            share s = part_share(r, l, p);
            if (s.lo > s.hi) {
                return kvb_fail(err, KVB_UNSUPPORTED,
                                "constraints: layer %u: at %u tokens, in pages of %u, its %u heads must keep at least "
                                "%llu pages, but its cap is %llu; nothing fits",
                                (unsigned)l, (unsigned)r->n_tokens, (unsigned)r->m->block, (unsigned)r->own,
                                (unsigned long long)s.lo, (unsigned long long)s.hi);
            }
        }
    }
    return KVB_OK;
}

// Parts of one rank, for find_shift.
typedef struct rank_parts {
    const rounding *r;
    uint32_t rank;
} rank_parts;

static share get_part(const void *from, size_t layer)
{
    const rank_parts *p = from;
    return part_share(p->r, (uint32_t)layer, p->rank);
}

// Finds the total of parts that must all have the same one.
static kvb_status equal_total(const share *sums, uint32_t n, uint64_t *total, const rounding *r, kvb_error *err)
{
    uint64_t lo = 0, hi = UINT64_MAX;
    double ideal = INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        lo = sums[i].lo > lo ? sums[i].lo : lo;
        hi = sums[i].hi < hi ? sums[i].hi : hi;
        ideal = sums[i].ideal < ideal ? sums[i].ideal : ideal;
    }
    if (lo > hi) {
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "constraints: at %u tokens, in pages of %u, one rank must keep at least %llu pages and another "
                        "at most %llu, so that totals cannot be equal",
                        (unsigned)r->n_tokens, (unsigned)r->m->block, (unsigned long long)lo, (unsigned long long)hi);
    }
    ideal = floor(ideal + KVB_LIMITS_GRACE);
    *total = ideal < (double)lo ? lo : ideal > (double)hi ? hi : (uint64_t)ideal;
    return KVB_OK;
}

// Computes the totals of all parts. A part's total is stored where its first head's budget will be.
static kvb_status round_parts(const rounding *r, kvb_error *err)
{
    const kvb_limits *m = r->m;
    share sums[KVB_MAX_KV_HEADS]; // of ranks
    uint64_t total = 0;
    for (uint32_t l = 0; m->by_layer && l < m->n_layers; l++) {
        for (uint32_t p = 0; p < m->ranks; p++) sums[p] = part_share(r, l, p);
        kvb_status status = equal_total(sums, m->ranks, &total, r, err);
        if (status) return status;
        for (uint32_t p = 0; p < m->ranks; p++) r->keep[first_head(r, l, p)] = (uint32_t)total;
    }
    if (m->by_layer) return KVB_OK;
    for (uint32_t p = 0; p < m->ranks; p++) {
        sums[p] = (share){0, 0, 0, 1};
        for (uint32_t l = 0; l < m->n_layers; l++) {
            share s = part_share(r, l, p);
            sums[p].ideal += s.ideal;
            sums[p].lo += s.lo;
            sums[p].hi += s.hi;
        }
    }
    kvb_status status = equal_total(sums, m->ranks, &total, r, err);
    for (uint32_t p = 0; p < m->ranks && !status; p++) {
        rank_parts parts = {r, p};
        double low, high;
        find_shift(get_part, &parts, m->n_layers, total, 1.0 + (double)r->own * r->units, &low, &high);
        uint64_t left = total - shifted_sum(get_part, &parts, m->n_layers, low);
        for (uint32_t l = 0; l < m->n_layers; l++) {
            share s = part_share(r, l, p);
            uint64_t units = shifted(&s, low), more = shifted(&s, high) - units;
            more = more < left ? more : left;
            left -= more;
            r->keep[first_head(r, l, p)] = (uint32_t)(units + more);
        }
    }
    return status;
}

// The heads of one part in groups that get the same budget, in the order of their ideals.
typedef struct grouping {
    share group[KVB_MAX_KV_HEADS];
    uint16_t head[KVB_MAX_KV_HEADS];  // of the part, by ideal
    uint16_t count[KVB_MAX_KV_HEADS]; // heads in each group
    uint32_t n;
} grouping;

static share get_group(const void *from, size_t i)
{
    return ((const grouping *)from)->group[i];
}

// What group i and the next one are when they are joined.
static share joined(const grouping *g, uint32_t i)
{
    const share *a = &g->group[i], *b = &g->group[i + 1];
    share s;
    s.weight = a->weight + b->weight;
    s.ideal = (a->ideal * (double)a->weight + b->ideal * (double)b->weight) / (double)s.weight;
    s.lo = a->lo > b->lo ? a->lo : b->lo;
    s.hi = a->hi < b->hi ? a->hi : b->hi;
    return s;
}

static void join_groups(grouping *g, uint32_t i)
{
    g->group[i] = joined(g, i);
    g->count[i] = (uint16_t)(g->count[i] + g->count[i + 1]);
    --g->n;
    memmove(&g->group[i + 1], &g->group[i + 2], (g->n - i - 1) * sizeof *g->group);
    memmove(&g->count[i + 1], &g->count[i + 2], (g->n - i - 1) * sizeof *g->count);
}

// Joins groups until at most `levels` are left: always the neighbours that fit together whose ideals move least.
static bool join_to(grouping *g, uint32_t levels)
{
    while (g->n > 1) {
        uint32_t best = g->n;
        double least = INFINITY;
        for (uint32_t i = 0; i + 1 < g->n; i++) {
            const share *a = &g->group[i], *b = &g->group[i + 1];
            share s = joined(g, i);
            double far = b->ideal - a->ideal;
            double cost = far * far * (double)a->weight * (double)b->weight / (double)s.weight;
            bool equal = far < 1e-9; // one budget in the table: joined, whatever the number of levels
            if (s.lo <= s.hi && cost < least && (equal || g->n > levels)) {
                least = cost;
                best = i;
            }
        }
        if (best == g->n) break;
        join_groups(g, best);
    }
    return g->n <= levels;
}

static void sort_heads(grouping *g, const rounding *r, size_t first)
{
    g->n = r->own;
    for (uint32_t i = 0; i < r->own; i++) {
        share s;
        uint32_t j = i;
        head_share(r, first + i, &s);
        for (; j > 0 && r->m->levels && g->group[j - 1].ideal > s.ideal; --j) {
            g->group[j] = g->group[j - 1];
            g->head[j] = g->head[j - 1];
        }
        g->group[j] = s;
        g->head[j] = (uint16_t)i;
        g->count[i] = 1;
    }
}

static kvb_status round_part(const rounding *r, grouping *g, uint32_t layer, uint32_t rank, kvb_error *err)
{
    size_t first = first_head(r, layer, rank);
    uint64_t total = r->keep[first], least = 0;
    double low, high;
    sort_heads(g, r, first);
    if (r->m->levels && !join_to(g, r->m->levels)) {
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "constraints: layer %u: %u budgets are not enough for the limits of its heads at %u tokens",
                        (unsigned)layer, (unsigned)r->m->levels, (unsigned)r->n_tokens);
    }
    for (uint32_t i = 0; i < g->n; i++) least += g->group[i].weight * g->group[i].lo;
    uint64_t cap = kvb_limits_cap(r->m, layer, r->n_tokens);
    if (least > cap) {
        return kvb_fail(
            err, KVB_UNSUPPORTED,
            "constraints: layer %u: with %u budgets its heads keep at least %llu pages, but its cap is %llu",
            (unsigned)layer, (unsigned)r->m->levels, (unsigned long long)least, (unsigned long long)cap);
    }
    total = total < least ? least : total;
    find_shift(get_group, g, g->n, total, 1.0 + r->units, &low, &high);
    uint64_t left = total - shifted_sum(get_group, g, g->n, low);
    for (uint32_t i = 0, at = 0; i < g->n; i++) {
        const share *s = &g->group[i];
        uint64_t units = shifted(s, low), more = shifted(s, high) - units;
        if (more * s->weight > left) more = left / s->weight;
        left -= more * s->weight;
        uint64_t tokens = (units + more) * r->m->block;
        for (uint32_t k = 0; k < g->count[i]; ++k, ++at)
            r->keep[first + g->head[at]] = tokens < r->n_tokens ? (uint32_t)tokens : r->n_tokens;
    }
    return KVB_OK;
}

kvb_status kvb_limits_round(const kvb_limits *m, kvb_ideal *ideal, const void *self, uint32_t n_tokens,
                            uint32_t least_tokens, uint32_t *keep, kvb_error *err)
{
    rounding r = {.m = m, .ideal = ideal, .self = self, .n_tokens = n_tokens, .keep = keep};
    r.units = kvb_limits_units(m, n_tokens);
    r.floor_units = least_tokens / m->block + (least_tokens % m->block != 0);
    r.own = m->n_kv_heads / m->ranks;
    // A part's total is stored in 32 bits.
    if ((uint64_t)r.own * r.units > UINT32_MAX) {
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "constraints: %u heads of a layer with %u pages each: expected fewer than 2^32 in all",
                        (unsigned)r.own, (unsigned)r.units);
    }
    kvb_status status = check_parts(&r, err);
    if (!status) status = round_parts(&r, err);
    // One part after the other: a part's total is stored where its heads' budgets then go.
    grouping g;
    for (uint32_t l = 0; l < m->n_layers; l++)
        for (uint32_t p = 0; p < m->ranks && !status; p++) status = round_part(&r, &g, l, p, err);
    return status;
}
