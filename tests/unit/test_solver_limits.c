// Constraints on the runtime's whole numbers: tables from the solver, rounded for any T and ratio, are judged by
// constrained_check(), which shares no code with the rounding.
#include "solver/aggregate.h"
#include "solver/checker.h"
#include "solver/constrained.h"
#include "test_solver_cases.h"

// A row of prune ratios between two rows of a table.
typedef struct between {
    const double *below, *above;
    double weight;
} between;

static double ideal_between(const void *self, size_t head, uint32_t n_tokens)
{
    const between *b = self;
    return (1 - (b->below[head] + b->weight * (b->above[head] - b->below[head]))) * n_tokens;
}

typedef struct wishes {
    bool pages, levels, ranks, caps, ranges, pins, by_layer;
} wishes;

static kvb_limits make_limits(const cache_shape *s, const wishes *w)
{
    static const uint32_t pages[] = {16, 32, 64, 128, 256};
    kvb_limits m;
    help_ok(kvb_limits_init(&m, s->n_layers, s->n_kv_heads, err));
    m.by_layer = w->by_layer;
    if (w->pages) m.block = pages[case_below(5)];
    if (w->levels) m.levels = 1 + case_below(3);
    if (w->ranks) m.ranks = s->n_kv_heads % 4 == 0 && case_below(2) ? 4 : 2;
    for (uint32_t h = 0; h < s->n_layers * s->n_kv_heads; h++) {
        if (w->ranges && case_below(3) == 0) m.least[h] = 0.3 * case_uniform();
        if (w->ranges && case_below(3) == 0) m.most[h] = 0.5 + 0.5 * case_uniform();
        if (w->pins && case_below(10) == 0) m.least[h] = m.most[h] = 1;
    }
    for (uint32_t l = 0; w->caps && l < s->n_layers; l++) m.cap[l] = 0.7 + 0.3 * case_uniform();
    return m;
}

// Solves a table [99, L, G] of prune ratios. Returns false if the wishes contradict each other.
static bool make_table(const kvb_limits *m, const cache_shape *s, bool exact, double *prune)
{
    kvb_error err = {0};
    loss_curves c;
    solved_rows rows;
    double ratios[TABLE_ROWS];
    table_ratios(ratios);
    case_curves(&c, (case_kind)case_below(CASE_KINDS), s);
    kvb_status status = constrained_solve(&rows, &c, m, ratios, TABLE_ROWS, exact, &err);
    for (size_t i = 0; status == KVB_OK && i < (size_t)TABLE_ROWS * rows.n_heads; i++)
        prune[i] = 1 - (double)rows.keep[i] / s->n_tokens;
    for (int r = 0; status == KVB_OK && r < TABLE_ROWS; r++) // the table's own rows
        must(constrained_check(m, s->n_tokens, rows.keep + (size_t)r * rows.n_heads, &err), &err);
    if (status == KVB_OK) solved_rows_free(&rows);
    else ck_assert_msg(status == KVB_ARGUMENT, "%s", err.message);
    loss_curves_free(&c);
    return status == KVB_OK;
}

static uint64_t pages_of(const kvb_limits *m, const uint32_t *keep, uint32_t n)
{
    uint64_t pages = 0;
    for (uint32_t h = 0; h < n; h++) pages += (keep[h] + m->block - 1) / m->block;
    return pages;
}

// Whether there are no levels, ranks or lower limits, so that no more pages are kept than the ratio asks for.
static bool only_ceilings(const kvb_limits *m)
{
    bool none = m->levels == 0 && m->ranks == 1;
    for (uint32_t h = 0; h < m->n_layers * m->n_kv_heads; h++) none &= m->least[h] == 0;
    return none;
}

static int round_all(const kvb_limits *m, const cache_shape *s, const double *prune, const wishes *w)
{
    uint32_t keep[64], n = shape_heads(s);
    int refused = 0;
    for (int round = 0; round < 12; round++) {
        uint32_t tokens = round == 0   ? 100
                          : round == 1 ? 131072
                          : round == 2 ? s->n_tokens
                          : round == 3 ? 1u << 28 // where shifts are coarse
                                       : (uint32_t)(100 * pow(1310.72, case_uniform()));
        uint32_t strict = case_below(3) == 0 && tokens > 800 ? 8 : 1;
        for (int row = 0; row < TABLE_ROWS; row++) {
            kvb_error err = {0};
            const double *at = prune + (size_t)row * n;
            between b = {at, row + 1 < TABLE_ROWS ? at + n : at, case_below(2) ? 0 : case_uniform()};
            kvb_status status = kvb_limits_round(m, ideal_between, &b, tokens, strict, keep, &err);
            if (status != KVB_OK) { // only pages that are coarse for the context may be refused
                ck_assert_msg(status == KVB_UNSUPPORTED && tokens < 40 * m->block, "T %u, page %u: %s", tokens,
                              m->block, err.message);
                refused++;
                continue;
            }
            status = constrained_check(m, tokens, keep, &err);
            ck_assert_msg(status == KVB_OK, "T %u, row %d, page %u, levels %u, ranks %u: %s", tokens, row, m->block,
                          m->levels, m->ranks, err.message);
            for (uint32_t h = 0; h < n; h++) ck_assert(keep[h] >= (strict < tokens ? strict : tokens));
            if (!only_ceilings(m) || strict > 1 || w->by_layer) continue;
            double sum = 0; // the budget: no page more, unless every head needs its one
            for (uint32_t h = 0; h < n; h++) {
                double ideal = ideal_between(&b, h, tokens);
                sum += ideal > tokens - 1e-6 ? (tokens + m->block - 1) / m->block : ideal / m->block;
            }
            uint64_t pages = pages_of(m, keep, n), most = (uint64_t)(sum + 1e-6);
            ck_assert_msg(pages <= (most > n ? most : n), "T %u row %d: %llu pages for %g", tokens, row,
                          (unsigned long long)pages, sum);
            if (!w->caps && !w->ranges) ck_assert_uint_eq(pages, most > n ? most : n);
        }
    }
    return refused;
}

UNIT_TEST(runtime_keeps_to_all)
{
    int tables = 0, refused = 0;
    for (int round = 0; round < 70; round++) {
        wishes w = {case_below(2),      case_below(3) == 0, false, case_below(3) == 0, case_below(2),
                    case_below(3) == 0, case_below(4) == 0};
        cache_shape s = {1 + case_below(6), 1 + case_below(8), 200 + case_below(400), 2, 4};
        w.ranks = !w.levels && s.n_kv_heads % 2 == 0 && case_below(2);
        if (w.pages) s.n_tokens *= 8;
        kvb_limits m = make_limits(&s, &w);
        double *prune = malloc(sizeof *prune * TABLE_ROWS * shape_heads(&s));
        ck_assert_ptr_nonnull(prune);
        kvb_error err = {0};
        if (kvb_limits_check(&m, &err) == KVB_OK && make_table(&m, &s, round % 8 == 0, prune)) {
            tables++;
            refused += round_all(&m, &s, prune, &w);
        }
        free(prune);
        kvb_limits_free(&m);
    }
    printf("tables %d, budgets refused for coarse pages %d\n", tables, refused);
    ck_assert_int_gt(tables, 50);
}

// Averages of tables break pages and levels; the projection restores them, and does not change what is allowed.
UNIT_TEST(projection)
{
    for (int round = 0; round < 30; round++) {
        wishes w = {round % 2 == 0, round % 3 == 0, round % 3 == 1, round % 5 == 0,
                    round % 4 == 0, false,          round % 7 == 0};
        cache_shape s = {3, 4, 640, 2, 4};
        kvb_limits m = make_limits(&s, &w);
        enum { HEADS = 12 };
        double prune[TABLE_ROWS * HEADS], again[TABLE_ROWS * HEADS], ratios[TABLE_ROWS];
        uint8_t saturated[TABLE_ROWS] = {0};
        kvb_error err = {0};
        table_ratios(ratios);
        for (int r = 0; r < TABLE_ROWS; r++)
            for (int h = 0; h < HEADS; h++) prune[r * HEADS + h] = fmin(0.99, ratios[r] * (0.5 + case_uniform()));
        if (kvb_limits_check(&m, &err) == KVB_OK &&
            constrained_project(&m, &s, 7, ratios, TABLE_ROWS, prune, saturated, &err) == KVB_OK) {
            for (int r = 0; r < TABLE_ROWS; r++) {
                uint32_t keep[HEADS];
                for (int h = 0; h < HEADS; h++) keep[h] = (uint32_t)rint((1 - prune[r * HEADS + h]) * s.n_tokens);
                must(constrained_check(&m, s.n_tokens, keep, &err), &err);
                if (!saturated[r]) {
                    uint32_t layers = m.by_layer ? 1 : 3;
                    uint64_t own = (uint64_t)((1 - ratios[r]) * (layers * 4 * s.n_tokens) + 1e-6);
                    uint64_t budget = own * (3 / layers);
                    ck_assert_uint_le(pages_of(&m, keep, HEADS) * m.block, budget);
                }
            }
            memcpy(again, prune, sizeof prune);
            must(constrained_project(&m, &s, 7, ratios, TABLE_ROWS, again, saturated, &err), &err);
            if (!m.levels)
                for (int i = 0; i < TABLE_ROWS * HEADS; i++) ck_assert(fabs(again[i] - prune[i]) < 1e-12);
        }
        kvb_limits_free(&m);
    }
}

static void refuse(const char *text, const char *expected)
{
    kvb_limits m;
    kvb_error err = {0};
    kvb_status status = kvb_limits_parse(&m, text, 2, 4, "t", &err);
    ck_assert_msg(status != KVB_OK && strstr(err.message, expected), "%s: %s", text, err.message);
    ck_assert_ptr_null(m.least);
}

UNIT_TEST(metadata)
{
    kvb_limits m;
    help_ok(kvb_limits_parse(&m,
                             "{\"block\":16,\"levels\":2,\"by_layer\":true,\"layer_cap\":[0.5,1],"
                             "\"least\":[0,0,0,0,1,0,0,0.25],\"most\":[1,1,0.5,1,1,1,1,1]}",
                             2, 4, "t", err));
    ck_assert(m.block == 16 && m.levels == 2 && m.ranks == 1 && m.by_layer);
    ck_assert(m.cap[0] == 0.5 && m.cap[1] == 1 && m.least[4] == 1 && m.least[7] == 0.25 && m.most[2] == 0.5);
    // Shares of a thousand tokens that are whole numbers are not rounded.
    m.block = 1, m.least[0] = 0.3, m.most[0] = 0.7;
    unit_numbers(kvb_limits_least(&m, 0, 1000), 300, kvb_limits_most(&m, 0, 10), 7);
    m.block = 16;
    unit_numbers(kvb_limits_least(&m, 0, 1000), 19, kvb_limits_most(&m, 0, 1000), 43);
    ck_assert_uint_eq(kvb_limits_least(&m, 4, 1000), 63); // pinned: the last page too
    kvb_limits_free(&m);
    refuse("[]", "expected a JSON object");
    refuse("{\"block\":0}", "whole number from 1");
    refuse("{\"block\":1.5}", "whole number from 1");
    refuse("{\"ranks\":3}", "divisor of the 4 KV heads");
    refuse("{\"ranks\":2,\"levels\":2}", "cannot be combined");
    refuse("{\"least\":[0,0]}", "array of 8 shares");
    refuse("{\"least\":[0,0,0,0,0,0,0,2]}", "element 7");
    refuse("{\"least\":[0.5,0,0,0,0,0,0,0],\"most\":[0.25,1,1,1,1,1,1,1]}", "at least 0.5 and at most 0.25");
    refuse("{\"least\":[1,1,1,0,0,0,0,0],\"layer_cap\":[0.5,1]}", "layer 0");
    refuse("{\"colour\":1}", "\"colour\" is not known");
}

// Wishes that no budgets fulfil are refused, with the numbers.
UNIT_TEST(contradictions)
{
    kvb_error err = {0};
    cache_shape s = {2, 2, 100, 2, 2};
    loss_curves c;
    solved_rows rows;
    double ratios[] = {0.5, 0.9};
    kvb_limits m;
    case_curves(&c, CASE_RANDOM, &s);
    must(kvb_limits_init(&m, 2, 2, &err), &err);
    for (int h = 0; h < 4; h++) m.least[h] = 0.25;
    must(constrained_solve(&rows, &c, &m, ratios, 2, false, &err), &err);
    ck_assert(!rows.saturated[0] && rows.saturated[1]);
    solved_rows_free(&rows);
    must(constrained_require(&c, &m, ratios, 1, &err), &err);
    unit_refuses(constrained_require(&c, &m, ratios, 2, &err), KVB_ARGUMENT, "ratio 0.9");
    ck_assert(strstr(err.message, "at least 100") && strstr(err.message, "budget is 40"));
    m.most[1] = 0.3; // between two pages of 64
    m.block = 64;
    unit_refuses(constrained_solve(&rows, &c, &m, ratios, 2, false, &err), KVB_ARGUMENT, "layer 0, KV head 1");
    ck_assert_ptr_nonnull(strstr(err.message, "at least 1 pages and at most 0"));
    m.block = 1;
    m.ranks = 2; // rank 0 full in both layers, rank 1 at most at 30 %
    m.least[0] = m.least[2] = 1, m.most[3] = 0.3;
    unit_refuses(constrained_solve(&rows, &c, &m, ratios, 2, false, &err), KVB_ARGUMENT, "200..200 and 50..60");
    m.ranks = 1;
    m.levels = 1; // head 0 is full, head 1 may not be
    unit_refuses(constrained_solve(&rows, &c, &m, ratios, 2, false, &err), KVB_ARGUMENT, "more than 1 budgets");
    kvb_limits_free(&m);
    loss_curves_free(&c);
}

// A length whose totals exceed 32 bits is refused; one that is just short of that is rounded in reasonable time.
UNIT_TEST(huge_lengths)
{
    kvb_limits m;
    uint32_t keep[4];
    double prune[4] = {0.004, 0.5, 0.996, 0.1};
    between b = {prune, prune, 0};
    help_ok(kvb_limits_init(&m, 2, 2, err));
    help_fails(kvb_limits_round(&m, ideal_between, &b, UINT32_MAX, 1, keep, err), KVB_UNSUPPORTED, "2^32");
    m.block = 16, m.cap[0] = 0.4, m.least[1] = 0.17;
    help_ok(kvb_limits_round(&m, ideal_between, &b, UINT32_MAX, 1, keep, err));
    help_ok(constrained_check(&m, UINT32_MAX, keep, err));
    kvb_limits_free(&m);
}

// Questions on contexts of different lengths become one constrained table. Its bound is proved, and its budgets keep
// every limit at each of the lengths.
UNIT_TEST(unequal_lengths)
{
    for (int round = 0; round < 40; round++) {
        kvb_error err = {0};
        wishes w = {case_below(2), case_below(3) == 0, false, case_below(2), case_below(2), case_below(3) == 0, false};
        cache_shape s[3] = {{1 + case_below(4), 2 * (1 + case_below(2)), 900 + case_below(300), 2, 4}};
        w.ranks = !w.levels && case_below(2);
        kvb_limits m = make_limits(&s[0], &w);
        if (m.block > 64) m.block = 64;
        loss_mean mean;
        loss_curves pair[3];
        loss_mean_init(&mean, &s[0]);
        for (int k = 0; k < 3; k++) {
            s[k] = s[0];
            if (k) s[k].n_tokens -= case_below(500);
            case_curves(&pair[k], (case_kind)((round + k) % CASE_KINDS), &s[k]);
            must(loss_mean_add(&mean, &pair[k], &err), &err);
        }
        loss_mean_finish(&mean);
        uint32_t n = shape_heads(&s[0]), keep[16];
        const double ratios[] = {0.1, 0.3, 0.5};
        double proved[3], prune[3 * 16], loss[3] = {0};
        solved_rows rows;
        kvb_status status = kvb_limits_check(&m, &err);
        if (status == KVB_OK) status = constrained_solve(&rows, &mean.curves, &m, ratios, 3, round % 3 == 0, &err);
        if (status == KVB_OK) {
            must(checker_limited_rows(&mean.curves, &m, 3, ratios, NULL, proved, &err), &err);
            for (int r = 0; r < 3; r++) {
                ck_assert(rows.bound[r] <= proved[r] + 1e-9 && rows.bound[r] <= rows.loss[r] + 1e-12);
                ck_assert(rows.loss[r] <= rows.greedy[r] + 1e-12);
                for (uint32_t h = 0; h < n; h++)
                    prune[(size_t)r * n + h] = 1 - (double)rows.keep[(size_t)r * n + h] / s[0].n_tokens;
                for (int k = 0; k < 3; k++) {
                    between b = {prune + (size_t)r * n, prune + (size_t)r * n, 0};
                    must(kvb_limits_round(&m, ideal_between, &b, s[k].n_tokens, 1, keep, &err), &err);
                    must(constrained_check(&m, s[k].n_tokens, keep, &err), &err);
                }
            }
            for (int k = 0; k < 3; k++) must(constrained_loss_add(loss, &pair[k], &m, 3, prune, keep, &err), &err);
            // Losses are read between lengths and rounded, so the mean curves are right to about a page of every head.
            for (int r = 0; r < 3; r++) ck_assert(fabs(loss[r] / 3 - rows.loss[r]) < 0.05 + 0.002 * m.block);
            solved_rows_free(&rows);
        } else ck_assert_msg(status == KVB_ARGUMENT, "%s", err.message);
        for (int k = 0; k < 3; k++) loss_curves_free(&pair[k]);
        loss_mean_free(&mean);
        kvb_limits_free(&m);
    }
}

UNIT_TEST(losses_are_those_of_whole_pages)
{
    const uint32_t keep[4] = {0, 1, 2, 4};
    cache_shape shape = {2, 2, 60, 0, 0};
    kvb_limits m = make_limits(&shape, &(wishes){.pages = false});
    loss_curves c;
    constrained_instance x;
    m.block = 16;
    case_curves(&c, CASE_RANDOM, &shape);
    help_ok(constrained_instance_make(&x, &m, &c, err));
    double want = loss_at(&c, 0, 0) + loss_at(&c, 1, 16) + loss_at(&c, 2, 32) + loss_at(&c, 3, 60);
    ck_assert_double_eq_tol(instance_loss(&x, 0, 4, keep), want, 1e-12);
    constrained_instance_free(&x);
    loss_curves_free(&c);
    kvb_limits_free(&m);
}

UNIT_MAIN_EACH("limits", case_seed, NULL)
