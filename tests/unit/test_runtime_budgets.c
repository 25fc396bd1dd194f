// From shares to tokens: against kvpress (tests/golden/make_topk.py), against slow rewrites of the rules, and by hand.
#include "runtime/torch_topk.h"
#include "test_runtime_cases.h"

// ---- golden data ----

static char *read_golden(void)
{
    FILE *f = fopen("tests/golden/topk.txt", "r");
    ck_assert_msg(f, "tests/golden/topk.txt: run from the root of the repository");
    char *text = calloc(1, 1 << 20);
    size_t size = fread(text, 1, (1 << 20) - 1, f);
    ck_assert_uint_lt(size, (1 << 20) - 1);
    fclose(f);
    return text;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void expect_equals_sign(char **at)
{
    *at += strspn(*at, " ");
    ck_assert_int_eq(**at, '=');
    ++*at;
}

static void check_sum(char *line)
{
    size_t n = strtoul(line, &line, 10);
    float *values = calloc(n, sizeof *values);
    for (size_t i = 0; i < n; ++i) values[i] = float_of((uint32_t)strtoul(line, &line, 16));
    expect_equals_sign(&line);
    float expected = float_of((uint32_t)strtoul(line, &line, 16)), found = kvb_torch_sum(values, n);
    ck_assert_msg(memcmp(&expected, &found, sizeof found) == 0, "sum of %zu: %a, expected %a", n, found, expected);
    free(values);
}

static void check_topk(char *line)
{
    size_t n = strtoul(line, &line, 10), k = strtoul(line, &line, 10);
    kvb_topk_item *items = calloc(n, sizeof *items);
    unsigned char *taken = calloc(n, 1);
    for (size_t i = 0; i < n; ++i) {
        items[i].value = (float)strtod(line, &line);
        items[i].index = (uint32_t)i;
    }
    kvb_torch_topk(items, n, k);
    for (size_t i = 0; i < k; ++i) taken[items[i].index] = 1;
    expect_equals_sign(&line);
    for (size_t i = 0; i < k; ++i) {
        size_t index = strtoul(line, &line, 10);
        ck_assert_msg(taken[index], "topk of %zu, k = %zu: torch takes %zu", n, k, index);
    }
    free(items);
    free(taken);
}

static void check_row(const kvb_table *rows, char *line)
{
    double ratio = strtod(line, &line);
    uint32_t row = (uint32_t)strtoul(line, &line, 10), keep[6];
    kvb_budget_summary sum;
    ck_assert_int_eq(kvb_budgets(rows, ratio, 1000, NULL, keep, 6, NULL), KVB_OK);
    ck_assert_int_eq(kvb_budgets_summarize(rows, ratio, 1000, NULL, keep, 6, &sum, NULL), KVB_OK);
    ck_assert_msg(keep[0] == 1000 - 10 * (row + 1), "ratio %.17g: %u tokens, expected row %u", ratio, keep[0], row);
    unit_numbers(sum.row_below, row + 1, sum.row_above, row + 1);
    ck_assert(sum.weight == 0);
}

static void check_counts(char *line)
{
    uint32_t heads = (uint32_t)strtoul(line, &line, 10), tokens = (uint32_t)strtoul(line, &line, 10), keep[128];
    double *r = calloc((size_t)CASE_ROWS * heads, sizeof *r);
    for (uint32_t g = 0; g < heads; ++g) r[49 * heads + g] = strtod(line, &line);
    table_case c = case_default();
    c.n_layers = 1, c.n_kv_heads = heads, c.prune_ratio = r;
    kvb_table *t = case_open(&c);
    ck_assert_int_eq(kvb_budgets(t, 0.5, tokens, NULL, keep, 128, NULL), KVB_OK);
    expect_equals_sign(&line);
    for (uint32_t g = 0; g < heads; ++g) {
        uint32_t expected = (uint32_t)strtoul(line, &line, 10);
        ck_assert_msg(keep[g] == expected, "%u heads, %u tokens: head %u keeps %u, kvpress %u", heads, tokens, g,
                      keep[g], expected);
    }
    kvb_table_close(t);
    free(r);
}

UNIT_TEST(test_kvpress)
{
    char *text = read_golden(), *rest = text;
    size_t counts[4] = {0};
    table_case c = case_default();
    kvb_table *rows = case_open(&c);
    for (char *line = strtok_r(rest, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *numbers = line + strcspn(line, " ");
        if (strncmp(line, "sum ", 4) == 0) {
            check_sum(numbers);
            ++counts[0];
        } else if (strncmp(line, "topk ", 5) == 0) {
            check_topk(numbers);
            ++counts[1];
        } else if (strncmp(line, "row ", 4) == 0) {
            check_row(rows, numbers);
            ++counts[2];
        } else if (strncmp(line, "counts ", 7) == 0) {
            check_counts(numbers);
            ++counts[3];
        } else {
            ck_abort_msg("unknown line: %.40s", line);
        }
    }
    for (int i = 0; i < 4; ++i) ck_assert_uint_ge(counts[i], 90);
    kvb_table_close(rows);
    free(text);
}

// ---- tables of one test ----

// Returns a table with the given ratios in row 50, in layer-major order, and zeros in all other rows.
static kvb_table *table_of(uint32_t n_layers, uint32_t n_kv_heads, uint32_t sink, uint32_t window, const double *row_50)
{
    size_t heads = (size_t)n_layers * n_kv_heads;
    double *r = calloc(CASE_ROWS * heads, sizeof *r);
    memcpy(r + 49 * heads, row_50, heads * sizeof *r);
    table_case c = case_default();
    c.n_layers = n_layers, c.n_kv_heads = n_kv_heads, c.sink = sink, c.window = window;
    c.prune_ratio = r;
    kvb_table *t = case_open(&c);
    free(r);
    return t;
}

static void expect_counts(const kvb_table *t, uint32_t n_tokens, const kvb_budget_options *opt,
                          const uint32_t *expected, size_t n)
{
    uint32_t keep[16];
    kvb_error err;
    kvb_status status = kvb_budgets(t, 0.5, n_tokens, opt, keep, 16, &err);
    ck_assert_msg(status == KVB_OK, "%s", status ? err.message : "");
    for (size_t h = 0; h < n; ++h) {
        ck_assert_msg(keep[h] == expected[h], "head %zu of %u tokens: %u, expected %u", h, n_tokens, keep[h],
                      expected[h]);
    }
}

UNIT_TEST(test_roundings)
{
    kvb_budget_options floor_rule = {.rounding = KVB_ROUND_FLOOR}, global = {.rounding = KVB_ROUND_GLOBAL_LR};
    kvb_table *t = table_of(1, 3, 0, 0, (const double[]){0.5, 0.5004, 0.2501});
    expect_counts(t, 10, NULL, (const uint32_t[]){5, 5, 7}, 3); // ideals 5, 4.996, 7.499: sum 17.495
    expect_counts(t, 10, &floor_rule, (const uint32_t[]){5, 4, 7}, 3);
    expect_counts(t, 10, &global, (const uint32_t[]){5, 5, 7}, 3);
    kvb_table_close(t);

    // Layers of ideals (2.4, 2.4) and (3.3, 3.3): each layer rounds to 5 and 7, the model to 11.
    t = table_of(2, 2, 0, 0, (const double[]){0.76, 0.76, 0.67, 0.67});
    expect_counts(t, 10, NULL, (const uint32_t[]){3, 2, 4, 3}, 4);
    expect_counts(t, 10, &floor_rule, (const uint32_t[]){2, 2, 3, 3}, 4);
    expect_counts(t, 10, &global, (const uint32_t[]){3, 2, 3, 3}, 4); // the tie goes to the lower head
    kvb_table_close(t);

    // (1 - 0.8) * 1000 is 199.99999999999997 in doubles, and everything has at least one token.
    t = table_of(1, 2, 0, 0, (const double[]){0.8, 1.0});
    expect_counts(t, 1000, &floor_rule, (const uint32_t[]){200, 1}, 2);
    expect_counts(t, 1000, &global, (const uint32_t[]){199, 1}, 2); // that token is taken from head 0
    expect_counts(t, 1, NULL, (const uint32_t[]){1, 1}, 2);
    expect_counts(t, 1, &floor_rule, (const uint32_t[]){1, 1}, 2);
    expect_counts(t, 1, &global, (const uint32_t[]){1, 1}, 2);
    kvb_table_close(t);
}

UNIT_TEST(test_strict)
{
    kvb_budget_options strict = {.strict = 1};
    kvb_table *t = table_of(2, 2, 4, 1, (const double[]){0.9, 0.2, 0.97, 0.33});
    expect_counts(t, 20, NULL, (const uint32_t[]){2, 16, 1, 13}, 4);
    // 3 + 4 tokens are missing below a floor of 5. They are taken from the head that keeps most, in turn once two are
    // level.
    expect_counts(t, 20, &strict, (const uint32_t[]){5, 11, 5, 11}, 4);
    expect_counts(t, 4, &strict, (const uint32_t[]){4, 4, 4, 4}, 4); // T below the floor: keep all
    kvb_table_close(t);
    t = table_of(1, 3, 4, 1, (const double[]){0.9, 0.5, 0.9});
    expect_counts(t, 12, &strict, (const uint32_t[]){5, 5, 5}, 3); // 8 tokens cannot pay for it: the total grows
    kvb_table_close(t);
}

UNIT_TEST(test_blocks)
{
    kvb_budget_options block = {.block = 16}, strict = {.block = 4, .strict = 1};
    kvb_table *t = table_of(1, 4, 4, 1, (const double[]){0.99, 0.5, 0.25, 0.4});
    expect_counts(t, 100, NULL, (const uint32_t[]){1, 50, 75, 60}, 4);
    // 186 tokens are 11.6, so 12 blocks: 0 3 4 3 whole ones, and the two left go to the largest remainders, 12 (head 3)
    // and 11 (head 2). Then head 0 needs one, from head 2, which has the most.
    expect_counts(t, 100, &block, (const uint32_t[]){16, 48, 64, 64}, 4);
    expect_counts(t, 10, &block, (const uint32_t[]){10, 10, 10, 10}, 4); // one block reaches beyond T
    // 1 50 75 60 -> 46.5 -> 47 blocks of 4: 0 12 18 15, and the two left go to heads 2 and 1. Head 0 needs 2 blocks for
    // 5 tokens, both from head 2.
    expect_counts(t, 100, &strict, (const uint32_t[]){8, 52, 68, 60}, 4);
    block.block = UINT32_MAX;
    expect_counts(t, 100, &block, (const uint32_t[]){100, 100, 100, 100}, 4);
    kvb_table_close(t);
}

// ---- rules rewritten slowly ----

typedef struct slow_head {
    double fraction;
    size_t index;
} slow_head;

static int by_fraction(const void *a, const void *b)
{
    const slow_head *x = a, *y = b;
    if (x->fraction != y->fraction) return x->fraction > y->fraction ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

// Raises counts one token at a time, as the header words it.
static void slow_raise(uint32_t *count, size_t n, uint32_t floor_count)
{
    uint64_t missing = 0;
    for (size_t h = 0; h < n; ++h) {
        if (count[h] < floor_count) {
            missing += floor_count - count[h];
            count[h] = floor_count;
        }
    }
    for (; missing > 0; --missing) {
        size_t best = 0;
        for (size_t h = 1; h < n; ++h)
            if (count[h] > count[best]) best = h;
        if (count[best] == floor_count) return;
        --count[best];
    }
}

static void slow_global(const double *r, size_t n, uint32_t n_tokens, uint32_t *keep)
{
    slow_head order[64];
    double sum = 0;
    uint64_t base = 0;
    for (size_t h = 0; h < n; ++h) {
        double ideal = (1 - r[h]) * n_tokens;
        keep[h] = (uint32_t)ideal;
        order[h] = (slow_head){ideal - keep[h], h};
        base += keep[h];
        sum += ideal;
    }
    uint64_t total = (uint64_t)fmax(rint(sum), (double)n);
    qsort(order, n, sizeof *order, by_fraction);
    for (size_t i = 0; i < n && base < total; ++i, ++base) ++keep[order[i].index];
    slow_raise(keep, n, 1);
}

static void slow_blocks(uint32_t *keep, size_t n, uint32_t n_tokens, uint32_t block, uint32_t least)
{
    slow_head order[64];
    uint64_t total = 0, whole = 0;
    for (size_t h = 0; h < n; ++h) {
        total += keep[h];
        order[h] = (slow_head){keep[h] % block, h};
        keep[h] /= block;
        whole += keep[h];
    }
    qsort(order, n, sizeof *order, by_fraction);
    uint64_t wanted = (uint64_t)floor((double)total / block + 0.5);
    for (size_t i = 0; whole < wanted; ++i, ++whole) {
        ck_assert_uint_lt(i, n);
        ++keep[order[i].index];
    }
    slow_raise(keep, n, least);
    for (size_t h = 0; h < n; ++h) keep[h] = keep[h] * block < n_tokens ? keep[h] * block : n_tokens;
}

static void random_ratios(uint64_t *random, double *r, size_t n)
{
    uint64_t kind = case_random(random) % 4;
    for (size_t h = 0; h < n; ++h) {
        r[h] = kind == 0   ? (double)(case_random(random) % 5) / 5 // ties
               : kind == 1 ? (case_random(random) % 2 ? 0.99 : case_uniform(random))
               : kind == 2 ? 1 - 0.05 * case_uniform(random)
                           : case_uniform(random);
    }
}

UNIT_TEST(test_against_slow_rules)
{
    uint64_t random = case_seed("test_against_slow_rules");
    for (int round = 0; round < 400; ++round) {
        uint32_t layers = 1 + (uint32_t)(case_random(&random) % 6), heads = 1 + (uint32_t)(case_random(&random) % 9);
        uint32_t n_tokens = 1 + (uint32_t)(case_random(&random) % 300), sink = (uint32_t)(case_random(&random) % 8);
        uint32_t window = (uint32_t)(case_random(&random) % 40), block = 1 + (uint32_t)(case_random(&random) % 33);
        uint32_t n = layers * heads, floor_count = sink + window < n_tokens ? sink + window : n_tokens;
        double r[64];
        uint32_t plain[64], keep[64], slow[64];
        random_ratios(&random, r, n);
        kvb_table *t = table_of(layers, heads, sink, window, r);
        for (kvb_rounding rounding = KVB_ROUND_LAYER_LR; rounding <= KVB_ROUND_GLOBAL_LR; ++rounding) {
            kvb_budget_options opt = {.rounding = rounding};
            ck_assert_int_eq(kvb_budgets(t, 0.5, n_tokens, &opt, plain, 64, NULL), KVB_OK);
            if (rounding == KVB_ROUND_GLOBAL_LR) {
                slow_global(r, n, n_tokens, slow);
                ck_assert_msg(memcmp(plain, slow, n * sizeof *slow) == 0, "round %d: global_lr", round);
            }
            memcpy(slow, plain, sizeof slow);
            slow_raise(slow, n, floor_count ? floor_count : 1);
            opt.strict = 1;
            ck_assert_int_eq(kvb_budgets(t, 0.5, n_tokens, &opt, keep, 64, NULL), KVB_OK);
            ck_assert_msg(memcmp(keep, slow, n * sizeof *slow) == 0, "round %d: strict", round);
            if (block > 1) {
                for (int strict = 0; strict < 2; ++strict) {
                    opt.strict = strict, opt.block = block;
                    memcpy(slow, plain, sizeof slow);
                    uint32_t least = strict ? (floor_count + block - 1) / block : 1;
                    slow_blocks(slow, n, n_tokens, block, least ? least : 1);
                    ck_assert_int_eq(kvb_budgets(t, 0.5, n_tokens, &opt, keep, 64, NULL), KVB_OK);
                    ck_assert_msg(memcmp(keep, slow, n * sizeof *slow) == 0, "round %d: block", round);
                }
            }
        }
        kvb_table_close(t);
    }
}

// ---- lookup ----

UNIT_TEST(test_linear)
{
    table_case c = case_default();
    double r[99 * 6];
    uint64_t random = case_seed("test_linear");
    for (size_t row = 0; row < 99; ++row) { // pairs of heads with mean (row + 1) / 100
        for (size_t h = 0; h < 6; h += 2) {
            double mean = (double)(row + 1) / 100, off = fmin(mean, 1 - mean) * case_uniform(&random);
            r[row * 6 + h] = mean - off;
            r[row * 6 + h + 1] = mean + off;
        }
    }
    c.prune_ratio = r;
    kvb_table *t = case_open(&c);
    kvb_budget_options opt = {.lookup = KVB_LOOKUP_LINEAR, .rounding = KVB_ROUND_GLOBAL_LR};
    kvb_budget_summary sum;
    uint32_t keep[6], n_tokens = 1000000;
    for (double ratio = 0.0005; ratio < 0.99; ratio += 0.00171) {
        ck_assert_int_eq(kvb_budgets(t, ratio, n_tokens, &opt, keep, 6, NULL), KVB_OK);
        ck_assert_int_eq(kvb_budgets_summarize(t, ratio, n_tokens, &opt, keep, 6, &sum, NULL), KVB_OK);
        ck_assert_msg(fabs(sum.effective_ratio - ratio) < 1e-6, "ratio %g is %g", ratio, sum.effective_ratio);
        ck_assert(fabs((1 - sum.weight) * sum.row_below + sum.weight * sum.row_above - 100 * ratio) < 1e-9);
        ck_assert_uint_eq(sum.warnings & KVB_WARN_CLAMPED, 0);
        size_t i = sum.row_below; // between the rows, head by head
        double low = i ? r[(i - 1) * 6] : 0, high = r[i * 6], at = 1 - keep[0] / (double)n_tokens;
        ck_assert_msg(at > fmin(low, high) - 2e-6 && at < fmax(low, high) + 2e-6, "ratio %g", ratio);
    }
    // On a row, both lookups agree.
    kvb_budget_options nearest = {.rounding = KVB_ROUND_GLOBAL_LR};
    uint32_t other[6];
    for (int row = 1; row <= 99; ++row) {
        ck_assert_int_eq(kvb_budgets(t, row / 100.0, 4125, &opt, keep, 6, NULL), KVB_OK);
        ck_assert_int_eq(kvb_budgets(t, row / 100.0, 4125, &nearest, other, 6, NULL), KVB_OK);
        ck_assert_mem_eq(keep, other, sizeof keep); // 0.29 * 100 is 28.999999999999996
    }
    ck_assert_int_eq(kvb_budgets(t, 0.995, 4125, &opt, keep, 6, NULL), KVB_OK);
    ck_assert_int_eq(kvb_budgets(t, 0.99, 4125, &opt, other, 6, NULL), KVB_OK);
    ck_assert_mem_eq(keep, other, sizeof keep);
    kvb_table_close(t);
}

UNIT_TEST(test_summary)
{
    table_case c = case_default();
    c.saturated_row = 97;
    kvb_table *t = case_open(&c);
    kvb_budget_options linear = {.lookup = KVB_LOOKUP_LINEAR};
    kvb_budget_summary sum;
    static const struct {
        double ratio;
        uint32_t n_tokens;
        int linear;
        unsigned warnings;
    } cases[] = {
        {0.5, 4125, 0, 0},
        {0.97, 4125, 0, KVB_WARN_SATURATED},
        {0.97, 8250, 0, KVB_WARN_SATURATED},
        {0.97, 8251, 0, KVB_WARN_SATURATED | KVB_WARN_LENGTH},
        {0.5, 800, 0, 0},
        {0.5, 799, 0, KVB_WARN_LENGTH},
        {0.965, 4125, 1, KVB_WARN_SATURATED},
        {0.975, 4125, 1, KVB_WARN_SATURATED},
        {0.985, 4125, 1, 0},
        {0.999, 8000, 0, KVB_WARN_CLAMPED},
        {0.996, 8000, 1, KVB_WARN_CLAMPED},
        {0.002, 4125, 0, KVB_WARN_CLAMPED},
        {0.002, 4125, 1, 0},
        {0.995, 8000, 0, 0},
        {0.6, 10, 0, KVB_WARN_PROTECTED | KVB_WARN_LENGTH},
        {0.6, 12, 0, KVB_WARN_LENGTH | KVB_WARN_EFFECTIVE},
        {0, 4125, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        uint32_t keep[6];
        const kvb_budget_options *opt = cases[i].linear ? &linear : NULL;
        ck_assert_int_eq(kvb_budgets(t, cases[i].ratio, cases[i].n_tokens, opt, keep, 6, NULL), KVB_OK);
        ck_assert_int_eq(kvb_budgets_summarize(t, cases[i].ratio, cases[i].n_tokens, opt, keep, 6, &sum, NULL), KVB_OK);
        ck_assert_msg(sum.warnings == cases[i].warnings, "%g of %u: warnings %u, expected %u", cases[i].ratio,
                      cases[i].n_tokens, sum.warnings, cases[i].warnings);
        ck_assert(sum.requested_ratio == cases[i].ratio);
    }
    uint32_t keep[6] = {10, 20, 30, 1, 2, 3};
    ck_assert_int_eq(kvb_budgets_summarize(t, 0.5, 1000, NULL, keep, 6, &sum, NULL), KVB_OK);
    ck_assert_uint_eq(sum.total, 66);
    ck_assert(sum.effective_ratio == 1 - 66 / 6000.0);
    unit_numbers(sum.keep_min, 1, sum.keep_max, 30, sum.heads_below_protected, 3);
    ck_assert_uint_eq(sum.warnings, KVB_WARN_PROTECTED | KVB_WARN_EFFECTIVE);
    ck_assert_int_eq(kvb_budgets_summarize(t, 0.5, 1000, NULL, keep, 6, NULL, NULL), KVB_ARGUMENT);
    kvb_table_close(t);
}

UNIT_TEST(test_arguments)
{
    static const double bad_ratios[] = {1, 1.5, NAN, INFINITY, -INFINITY};
    table_case c = case_default();
    kvb_table *t = case_open(&c);
    uint32_t keep[6] = {77, 77, 77, 77, 77, 77};
    for (size_t i = 0; i < sizeof bad_ratios / sizeof bad_ratios[0]; ++i)
        help_fails(kvb_budgets(t, bad_ratios[i], 100, NULL, keep, 6, err), KVB_ARGUMENT, "ratio");
    help_fails(kvb_budgets(t, 0.5, 0, NULL, keep, 6, err), KVB_ARGUMENT, "");
    help_fails(kvb_budgets(t, 0.5, 100, NULL, keep, 5, err), KVB_CAPACITY, "6 counts");
    ck_assert_int_eq(kvb_budgets(NULL, 0.5, 100, NULL, keep, 6, NULL), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_budgets(t, 0.5, 100, NULL, NULL, 6, NULL), KVB_ARGUMENT);
    kvb_budget_options opt = {.rounding = (kvb_rounding)3};
    ck_assert_int_eq(kvb_budgets(t, 0.5, 100, &opt, keep, 6, NULL), KVB_ARGUMENT);
    opt = (kvb_budget_options){.lookup = (kvb_lookup)-1};
    ck_assert_int_eq(kvb_budgets(t, 0.5, 100, &opt, keep, 6, NULL), KVB_ARGUMENT);
    for (int h = 0; h < 6; ++h) ck_assert_uint_eq(keep[h], 77); // untouched by all of these
    for (double ratio = 0; ratio > -3; ratio -= 1.25) {
        ck_assert_int_eq(kvb_budgets(t, ratio, 100, NULL, keep, 6, NULL), KVB_OK);
        unit_numbers(keep[0], 100, keep[5], 100);
    }
    // The longest context that the type allows.
    for (kvb_rounding rounding = KVB_ROUND_LAYER_LR; rounding <= KVB_ROUND_GLOBAL_LR; ++rounding) {
        opt = (kvb_budget_options){.rounding = rounding, .strict = 1, .block = rounding ? 4096 : 0};
        ck_assert_int_eq(kvb_budgets(t, 1e-9, UINT32_MAX, &opt, keep, 6, NULL), KVB_OK);
        ck_assert_msg(keep[0] > 4252000000u && keep[0] < 4252100000u, "%u", keep[0]); // of the row at 1 %
    }
    kvb_table_close(t);
}

// A bounded layer keeps everything and does not count: the others get the budgets of a table without it.
UNIT_TEST(test_bounded_layers)
{
    enum { L = 3, G = 2, T = 777 };
    static double all[CASE_ROWS * L * G], counted[CASE_ROWS * (L - 1) * G];
    for (size_t r = 0, i = 0; r < CASE_ROWS; r++)
        for (size_t h = 0; h < L * G; h++) {
            double ratio = (double)(r + 1) / 100 * (0.8 + 0.08 * (double)h);
            all[r * L * G + h] = h / G == 1 ? 0 : ratio < 1 ? ratio : 1;
            if (h / G != 1) counted[i++] = all[r * L * G + h];
        }
    table_case with = case_default(), without = case_default();
    with.prune_ratio = all, without.prune_ratio = counted, without.n_layers = L - 1;
    with.edit_from = "\"note\"", with.edit_to = "\"bounded_layers\":\"1\",\"note\"";
    kvb_table *tables[2] = {case_open(&with), case_open(&without)};
    const kvb_info *info = kvb_table_info(tables[0]);
    ck_assert(info->n_layers == L && info->n_budgeted == L - 1 && info->bounded[1] && !info->bounded[0]);
    ck_assert_mem_eq(kvb_table_budgeted_ratios(tables[0]), counted, sizeof counted);
    for (int i = 0; i < 24; i++) {
        kvb_budget_options opt = {(kvb_rounding)(i % 3), (kvb_lookup)(i / 3 % 2), i / 6 % 2, i / 12 ? 16 : 0};
        uint32_t keep[L * G], want[(L - 1) * G];
        kvb_budget_summary sums[2];
        double ratio = 0.03 + 0.04 * i;
        ck_assert_int_eq(kvb_budgets(tables[0], ratio, T, &opt, keep, L * G, NULL), KVB_OK);
        ck_assert_int_eq(kvb_budgets(tables[1], ratio, T, &opt, want, (L - 1) * G, NULL), KVB_OK);
        for (size_t h = 0; h < L * G; h++) {
            uint32_t expected = h / G == 1 ? T : want[h < G ? h : h - G];
            ck_assert_msg(keep[h] == expected, "head %zu: %u, expected %u", h, keep[h], expected);
        }
        ck_assert_int_eq(kvb_budgets_summarize(tables[0], ratio, T, &opt, keep, L * G, &sums[0], NULL), KVB_OK);
        ck_assert_int_eq(kvb_budgets_summarize(tables[1], ratio, T, &opt, want, (L - 1) * G, &sums[1], NULL), KVB_OK);
        ck_assert_uint_eq(sums[0].total, sums[1].total);
        ck_assert_double_eq(sums[0].effective_ratio, sums[1].effective_ratio);
    }
    for (int i = 0; i < 2; i++) kvb_table_close(tables[i]);
}

UNIT_MAIN("runtime_budgets")
