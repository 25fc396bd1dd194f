// The rule by which growing caches are cut: at every length, heads are within budget and buffer and hold the right
// tokens, and many cuts keep what one cut keeps.
#include "test_runtime_cases.h"
#include <math.h>

enum { L = 3, G = 2, H = L * G, MOST = 2400 };

// A cache with nothing but positions; a token's score in a head never changes.
typedef struct cache {
    uint32_t seen, cut_at, lengths[H], places[H][MOST], keep[H];
    kvb_budget_summary sum;
} cache;

static float score_of(uint32_t head, uint32_t place)
{
    uint64_t state = (uint64_t)head << 32 | place;
    return (float)(case_random(&state) >> 40);
}

static void cut(cache *c, const kvb_table *table, const kvb_growth *rule)
{
    static float scores[MOST];
    static uint32_t rows[MOST];
    help_ok(kvb_growth_budgets(table, rule, c->seen, c->cut_at, c->keep, H, &c->sum, err));
    for (uint32_t h = 0; h < H; h++) {
        uint32_t n = c->lengths[h], kept = c->keep[h] < n ? c->keep[h] : n;
        for (uint32_t i = 0; i < n; i++) scores[i] = score_of(h, c->places[h][i]);
        help_ok(kvb_reselect(scores, c->places[h], n, c->seen, c->keep[h], rule->sink, rule->window, rows, MOST, err));
        for (uint32_t i = 0; i < kept; i++) c->places[h][i] = c->places[h][rows[i]];
        c->lengths[h] = kept;
    }
    c->cut_at = c->seen;
}

static void add(cache *c, const kvb_table *table, const kvb_growth *rule, uint32_t n, int turn_ends)
{
    for (uint32_t h = 0; h < H; h++)
        for (uint32_t i = 0; i < n; i++) c->places[h][c->lengths[h]++] = c->seen + i;
    c->seen += n;
    if (kvb_growth_due(rule, c->seen, c->cut_at, turn_ends)) cut(c, table, rule);
}

// Returns a table with shares that differ from head to head. Their mean is what a row demands, unless heads prune at
// `most`: then the last rows prune less, as solved tables do.
static kvb_table *uneven(double most)
{
    static double prune[CASE_ROWS * H];
    for (int row = 0; row < CASE_ROWS; row++)
        for (int h = 0; h < H; h++) {
            double rho = (row + 1) / 100.0, room = rho < 1 - rho ? rho : 1 - rho;
            prune[row * H + h] = fmin(most, rho + room * ((h * 2 + 1) / (double)H - 1) * 0.9);
        }
    table_case c = case_default();
    c.prune_ratio = prune;
    return case_open(&c);
}

static void within(const cache *c, const kvb_growth *rule, uint64_t round)
{
    uint32_t hold = rule->buffer - rule->interval, newest = rule->window;
    for (uint32_t h = 0; h < H && c->cut_at >= rule->sink + newest; h++) {
        const uint32_t *p = c->places[h], n = c->lengths[h];
        ck_assert_msg(n <= c->keep[h] - hold + rule->buffer, "round %llu: head %u has %u rows of %u + %u",
                      (unsigned long long)round, h, n, c->keep[h] - hold, rule->buffer);
        ck_assert_uint_eq(p[n - 1], c->seen - 1);
        for (uint32_t i = 0; i < rule->sink; i++) ck_assert_uint_eq(p[i], i);
        uint32_t last = c->seen - c->cut_at; // rows since the cut, after those that it protected
        for (uint32_t i = 0; i < newest; i++) ck_assert_uint_eq(p[n - last - 1 - i], c->cut_at - 1 - i);
        for (uint32_t i = 1; i < n; i++) ck_assert_uint_gt(p[i], p[i - 1]);
    }
}

UNIT_TEST(test_rows_stay_within_budget_and_buffer)
{
    uint64_t random = case_seed("test_rows_stay_within_budget_and_buffer");
    static cache c;
    kvb_table *tables[] = {uneven(1), uneven(0.8)};
    for (uint64_t round = 0; round < 120; round++) {
        kvb_table *table = tables[round / 60];
        kvb_growth rule = {.interval = 1 + (uint32_t)(case_random(&random) % 90)};
        if (round % 2) rule.target_size = 8 + (uint32_t)(case_random(&random) % 120);
        else rule.ratio = 0.05 + 0.9 * case_uniform(&random);
        if (round % 3 == 0) rule.buffer = rule.interval + (uint32_t)(case_random(&random) % 50);
        help_ok(kvb_growth_check(table, &rule, err));
        memset(&c, 0, sizeof c);
        while (c.seen < 1200) {
            uint32_t n = case_random(&random) % 4 ? 1 : 1 + (uint32_t)(case_random(&random) % 300);
            add(&c, table, &rule, n, 0);
            within(&c, &rule, round);
            uint64_t total = 0;
            for (uint32_t h = 0; h < H; h++) total += c.keep[h];
            if (rule.target_size && c.cut_at && c.sum.requested_ratio > 0)
                ck_assert_uint_le(total, (uint64_t)H * (rule.target_size + rule.buffer - rule.interval));
        }
    }
    for (int i = 0; i < 2; i++) kvb_table_close(tables[i]);
}

// With fixed scores and equal heads, many cuts keep what one keeps: an evicted token would never have come back.
UNIT_TEST(test_many_cuts_are_one)
{
    static cache often, once;
    table_case alike = case_default();
    kvb_table *table = case_open(&alike);
    for (uint32_t chunk = 64; chunk <= 2048; chunk *= 2) {
        kvb_growth rule = {.target_size = 100, .interval = 50, .buffer = 70};
        help_ok(kvb_growth_check(table, &rule, err));
        memset(&often, 0, sizeof often);
        memset(&once, 0, sizeof once);
        for (uint32_t at = 0; at < 2048; at += chunk) add(&often, table, &rule, chunk, 0);
        for (int i = 0; i < 150; i++) add(&often, table, &rule, 1, 0);
        uint32_t cut_at = often.cut_at;
        add(&once, table, &rule, cut_at, 0);
        for (uint32_t i = cut_at; i < often.seen; i++) add(&once, table, &rule, 1, 0);
        ck_assert_mem_eq(often.lengths, once.lengths, sizeof often.lengths);
        for (uint32_t h = 0; h < H; h++)
            ck_assert_mem_eq(often.places[h], once.places[h], once.lengths[h] * sizeof(uint32_t));
    }
    kvb_table_close(table);
}

UNIT_TEST(test_budgets_are_those_of_the_table)
{
    kvb_table *table = uneven(1);
    const kvb_budget_options strict = {.strict = 1};
    uint32_t got[H], want[H];
    for (int again = 0; again < 2; again++)
        for (int interval = 0; interval < 2; interval++)
            for (int loose = 0; loose < 2; loose++) {
                kvb_growth rule = {.ratio = 0.97, .interval = interval ? 9 : 0, .loose = loose};
                help_ok(kvb_growth_check(table, &rule, err));
                help_ok(kvb_growth_budgets(table, &rule, 120, again ? 60 : 0, got, H, NULL, err));
                bool spared = !loose && (again || interval);
                help_ok(kvb_budgets(table, 0.97, 120, spared ? &strict : NULL, want, H, err));
                ck_assert_mem_eq(got, want, sizeof got);
            }
    kvb_growth rule = {.target_size = 60, .interval = 10, .buffer = 30};
    kvb_budget_summary sum;
    help_ok(kvb_growth_check(table, &rule, err));
    help_ok(kvb_growth_budgets(table, &rule, 80, 0, got, H, &sum, err));
    unit_numbers(sum.requested_ratio, 0, got[0], 80, got[5], 80, rule.sink, 4, rule.window, 21);
    help_ok(kvb_growth_budgets(table, &rule, 220, 0, got, H, &sum, err));
    help_ok(
        kvb_budgets(table, 0.7, 200, &(kvb_budget_options){.strict = 1, .lookup = KVB_LOOKUP_LINEAR}, want, H, err));
    for (int h = 0; h < H; h++) ck_assert_uint_eq(got[h], want[h] + 20);
    ck_assert_double_eq_tol(sum.requested_ratio, 0.7, 1e-12);
    kvb_table_close(table);
}

UNIT_TEST(test_when)
{
    kvb_table *table = uneven(1);
    kvb_growth turns = {.ratio = 0.5}, target = {.target_size = 50}, every = {.ratio = 0.5, .interval = 7};
    kvb_growth *const rules[] = {&turns, &target, &every};
    for (int i = 0; i < 3; i++) help_ok(kvb_growth_check(table, rules[i], err));
    unit_numbers(turns.interval, 0, turns.buffer, 0, turns.least, 5, target.interval, 128, target.buffer, 128);
    unit_numbers(kvb_growth_due(&turns, 9, 0, 0), 0, kvb_growth_due(&turns, 9, 0, 1), 1,
                 kvb_growth_due(&target, 127, 0, 1), 0, kvb_growth_due(&target, 128, 0, 0), 1,
                 kvb_growth_due(&every, 106, 100, 1), 0, kvb_growth_due(&every, 107, 100, 0), 1,
                 kvb_growth_due(&every, 50, 100, 0), 0, kvb_growth_due(NULL, 50, 0, 1), 0);
    kvb_table_close(table);
}

UNIT_TEST(test_refusals)
{
    kvb_table *table = uneven(1);
    uint32_t keep[H];
    const struct {
        kvb_growth rule;
        const char *says;
    } cases[] = {{{.ratio = 1}, "ratio"},
                 {{.ratio = NAN}, "ratio"},
                 {{.target_size = 5}, "target_size: expected at least 6, found 5"},
                 {{.target_size = 40, .least = 64}, "expected at least 65, found 40"},
                 {{.ratio = 0.5, .buffer = 9}, "buffer: needs an interval"},
                 {{.ratio = 0.5, .interval = 10, .buffer = 9}, "buffer: expected at least 10, found 9"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvb_growth rule = cases[i].rule;
        help_fails(kvb_growth_check(table, &rule, err), KVB_ARGUMENT, cases[i].says);
        ck_assert_mem_eq(&rule.target_size, &cases[i].rule.target_size, 4 * sizeof(uint32_t));
    }
    kvb_growth rule = {.ratio = 0.5, .interval = 10};
    help_fails(kvb_growth_budgets(table, &rule, 90, 0, keep, H, NULL, err), KVB_ARGUMENT, "kvb_growth_check() first");
    help_ok(kvb_growth_check(table, &rule, err));
    help_fails(kvb_growth_budgets(table, &rule, 0, 0, keep, H, NULL, err), KVB_ARGUMENT, "n_tokens");
    help_fails(kvb_growth_budgets(table, &rule, 90, 0, keep, H - 1, NULL, err), KVB_CAPACITY, "");
    help_fails(kvb_growth_budgets(NULL, &rule, 90, 0, keep, H, NULL, err), KVB_ARGUMENT, "NULL");
    help_fails(kvb_growth_check(table, NULL, err), KVB_ARGUMENT, "NULL");
    rule.options.rounding = 9;
    help_fails(kvb_growth_budgets(table, &rule, 90, 0, keep, H, NULL, err), KVB_ARGUMENT, "rounding");
    kvb_table_close(table);
}

UNIT_MAIN("runtime_grow")
