// Order by score, gains, loss curves, PAVA and hulls.
#include "solver/pava.h"
#include "solver/radix.h"
#include "test_solver_cases.h"
#include <float.h>

UNIT_TEST(floor_is_evaluated_in_double)
{
    // 0.01 * 4050 is 40.5, which rint takes to 40; (1.0 - 0.99) * 4050 is a little more.
    ck_assert_uint_eq(shape_floor(&(cache_shape){1, 1, 4050, 4, 1}), 41);
    ck_assert_uint_eq(shape_floor(&(cache_shape){1, 1, 4125, 4, 1}), 41);
    ck_assert_uint_eq(shape_floor(&(cache_shape){1, 1, 1024, 4, 32}), 36);
    ck_assert_uint_eq(shape_floor(&(cache_shape){1, 1, 10000, 4, 32}), 100);
    ck_assert_uint_eq(shape_floor(&(cache_shape){1, 1, 10, 0, 0}), 0);
}

enum { MOST_ITEMS = 5000 };

// By key, then by original place: the order that a stable sort must give.
static int stable_order(const void *x, const void *y)
{
    const keyed *a = x, *b = y;
    if (a->key != b->key) return a->key < b->key ? -1 : 1;
    return a->a < b->a ? -1 : a->a > b->a;
}

UNIT_TEST(sorts_stably)
{
    static keyed items[MOST_ITEMS], want[MOST_ITEMS], scratch[MOST_ITEMS];
    const size_t sizes[] = {0, 1, 2, 47, 48, 49, 1000, MOST_ITEMS}; // around the size from which digits are counted
    for (unsigned bits = 1; bits <= 64; bits += 9) {
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            size_t n = sizes[s];
            for (size_t i = 0; i < n; i++) items[i] = (keyed){case_next() >> (64 - bits), (uint32_t)i, 7 * (uint32_t)i};
            memcpy(want, items, n * sizeof *items);
            qsort(want, n, sizeof *want, stable_order);
            radix_sort(items, scratch, n, bits);
            for (size_t i = 0; i < n; i++)
                ck_assert_msg(items[i].key == want[i].key && items[i].a == want[i].a && items[i].b == want[i].b,
                              "%u bits, %zu items: item %zu", bits, n, i);
        }
    }
}

UNIT_TEST(keys_order_as_numbers)
{
    const double ascending[] = {-INFINITY, -DBL_MAX, -1, -FLT_MIN, -5e-324, 0,
                                5e-324,    FLT_MIN,  1,  1.5,      DBL_MAX, INFINITY};
    size_t n = sizeof ascending / sizeof *ascending;
    for (size_t i = 1; i < n; i++) {
        ck_assert_uint_lt(key_from_double(ascending[i - 1]), key_from_double(ascending[i]));
        float a = (float)ascending[i - 1], b = (float)ascending[i];
        if (a < b) ck_assert_uint_lt(key_from_float(a), key_from_float(b));
    }
    unit_numbers(key_from_double(-0.0), key_from_double(0.0), key_from_float(-0.0f), key_from_float(0.0f));
    for (size_t i = 0; i < n; i++)
        if (ascending[i] >= 0) ck_assert(double_from_key(key_from_double(ascending[i])) == ascending[i]);
}

UNIT_TEST(order_is_by_score_then_position)
{
    const float scores[10] = {99, 1, 3, 3, -INFINITY, -0.0f, 0.0f, INFINITY, -2, 99};
    const uint32_t expected[8] = {7, 2, 3, 1, 5, 6, 8, 4};
    cache_shape shape = {1, 1, 10, 1, 1};
    metric_order order;
    help_ok(metric_order_make(&order, &shape, scores, err));
    ck_assert_mem_eq(order.position, expected, sizeof expected);
    metric_order_free(&order);
}

UNIT_TEST(order_equals_slow_sort)
{
    for (int round = 0; round < 300; round++) {
        cache_shape shape = case_shape();
        size_t t = shape.n_tokens, m = shape_middle(&shape), n = shape_heads(&shape);
        float *scores = malloc(n * t * sizeof *scores);
        for (size_t i = 0; i < n * t; i++)
            scores[i] = (float)(round % 2 ? (double)case_below(5) - 2
                                          : (case_uniform() - 0.5) * pow(10, case_below(60) - 30.0));
        metric_order order;
        kvb_error err = {0};
        must(metric_order_make(&order, &shape, scores, &err), &err);
        for (size_t h = 0; h < n; h++)
            for (size_t i = 0; i < m; i++) {
                uint32_t p = order.position[h * m + i], q = i + 1 < m ? order.position[h * m + i + 1] : p;
                ck_assert(p >= shape.sink && p < t - shape.window);
                const float *row = scores + h * t;
                if (i + 1 < m) ck_assert(row[p] > row[q] || (row[p] == row[q] && p < q));
            }
        metric_order_free(&order);
        free(scores);
    }
}

// The fast hull has the blocks of PAVA, except that adjacent blocks of the same slope may be one block.
UNIT_TEST(fast_hull_equals_pava)
{
    for (int round = 0; round < 400; round++) {
        cache_shape shape = {1, 1, 1 + case_below(round % 4 ? 300 : 5000), 0, 0};
        loss_curves c;
        case_kind kind = (case_kind)(round % CASE_KINDS);
        case_curves(&c, kind, &shape);
        size_t n = shape.n_tokens, slow, fast, k = 0;
        hull_block *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b);
        ck_assert(a && b);
        slow = pava_blocks(a, c.gain, n);
        fast = curve_blocks(b, c.gain, c.loss, n);
        if (kind != CASE_TIED && kind != CASE_ZERO && kind != CASE_CONSTANT && kind != CASE_SPARSE)
            ck_assert_uint_eq(slow, fast);
        for (size_t i = 0; i < fast; i++) {
            uint32_t length = 0;
            double sum = 0;
            ck_assert(i == 0 || b[i].slope <= b[i - 1].slope);
            while (k < slow && length < b[i].length) {
                ck_assert(fabs(a[k].slope - b[i].slope) <= 1e-12 * c.total);
                length += a[k].length;
                sum += a[k++].sum;
            }
            ck_assert_uint_eq(length, b[i].length);
            ck_assert(fabs(sum - b[i].sum) <= 1e-12 * c.total);
        }
        ck_assert_uint_eq(k, slow);
        free(a);
        free(b);
        loss_curves_free(&c);
    }
}

UNIT_TEST(bad_numbers_are_refused_with_their_place)
{
    cache_shape shape = {2, 2, 6, 1, 1};
    float scores[24] = {0}, oracle[24] = {0};
    const float bad[] = {NAN, INFINITY, -INFINITY, -1e-30f};
    metric_order order;
    help_ok(metric_order_make(&order, &shape, scores, err));
    loss_curves c = loss_curves_make(&shape);
    for (int i = 0; i < 4; i++) {
        oracle[19] = bad[i];
        help_fails(loss_curves_fill(&c, &order, oracle, err), KVB_NUMERIC, "oracle: layer 1, KV head 1, token 1");
    }
    oracle[19] = -0.0f; // -0 is a zero too
    help_ok(loss_curves_fill(&c, &order, oracle, err));
    metric_order_free(&order);
    scores[11] = NAN; // a protected token: its score is not used, but a NaN there means that something is wrong
    help_fails(metric_order_make(&order, &shape, scores, err), KVB_NUMERIC, "scores: layer 0, KV head 1, token 5");
    ck_assert_ptr_null(order.position);
    loss_curves_free(&c);
}

// The oracle's own order is that of a metric with the oracle's numbers as its scores.
UNIT_TEST(the_oracles_own_order)
{
    enum { N = 2 * 2 * 7 };
    const cache_shape shape = {2, 2, 7, 1, 1};
    float oracle[N];
    for (int i = 0; i < N; i++) oracle[i] = (float)((i * 13) % 29);
    metric_order order;
    loss_curves perfect, ranked;
    help_ok(metric_order_make(&order, &shape, oracle, err));
    perfect = loss_curves_make(&shape);
    ranked = loss_curves_make(&shape);
    help_ok(loss_curves_fill_perfect(&perfect, oracle, err));
    help_ok(loss_curves_fill(&ranked, &order, oracle, err));
    for (uint32_t i = 0; i < shape_heads(&shape) * shape_middle(&shape); i++)
        ck_assert(perfect.gain[i] == ranked.gain[i]);
    for (uint32_t i = 0; i < shape_heads(&shape) * (shape_middle(&shape) + 1); i++)
        ck_assert(perfect.loss[i] == ranked.loss[i]);
    ck_assert(perfect.total == ranked.total && perfect.total > 0);
    oracle[3] = NAN;
    help_fails(loss_curves_fill_perfect(&perfect, oracle, err), KVB_NUMERIC, "");
    metric_order_free(&order);
    loss_curves_free(&perfect);
    loss_curves_free(&ranked);
}

UNIT_TEST(shapes_without_choice_are_refused)
{
    help_fails(cache_shape_check(&(cache_shape){1, 1, 36, 4, 32}, err), KVB_ARGUMENT,
               "4 sink + 32 window tokens protect all 36");
    help_fails(cache_shape_check(&(cache_shape){1, 1, 8, UINT32_MAX, 9}, err), KVB_ARGUMENT, "");
    help_fails(cache_shape_check(&(cache_shape){0, 1, 8, 0, 0}, err), KVB_ARGUMENT, "");
    help_fails(cache_shape_check(&(cache_shape){1, 0, 8, 0, 0}, err), KVB_ARGUMENT, "");
    help_fails(cache_shape_check(&(cache_shape){70000, 70000, 8, 0, 0}, err), KVB_UNSUPPORTED, "");
    help_fails(cache_shape_check(&(cache_shape){64, 8, UINT32_MAX, 0, 0}, err), KVB_UNSUPPORTED, "");
    help_ok(cache_shape_check(&(cache_shape){1, 1, 37, 4, 32}, err));
}

// methods.md 2.4, worked by hand.
static const double WORKED[8] = {30, 5, 25, 10, 2, 8, 12, 8};

UNIT_TEST(worked_example)
{
    const double loss[9] = {100, 70, 65, 40, 30, 28, 20, 8, 0};
    const double sum[4] = {30, 30, 10, 30}, slope[4] = {30, 15, 10, 7.5};
    const uint32_t length[4] = {1, 2, 1, 4};
    loss_curves c;
    hulls h;
    case_by_hand(&c, 1, 1, 8, WORKED);
    ck_assert(memcmp(c.loss, loss, sizeof loss) == 0);
    hulls_init(&h, &c.shape);
    for (int range = HULL_FEASIBLE; range <= HULL_FULL; range++) { // T = 8 has no floor: both ranges are the same
        help_ok(hulls_fill(&h, &c, (hull_range)range, err));
        ck_assert_uint_eq(h.count[0], 4);
        for (int k = 0; k < 4; k++) {
            ck_assert_double_eq(h.block[k].sum, sum[k]);
            ck_assert_double_eq(h.block[k].slope, slope[k]);
            ck_assert_uint_eq(h.block[k].length, length[k]);
        }
    }
    hulls_free(&h);
    loss_curves_free(&c);
}

// Returns the lower hull at c by its definition: the lowest chord over all pairs of points around c.
static double slow_hull(const double *loss, uint32_t m, uint32_t c)
{
    double best = loss[c];
    for (uint32_t i = 0; i < c; i++)
        for (uint32_t j = c + 1; j <= m; j++) {
            double chord = loss[i] + (loss[j] - loss[i]) * (c - i) / (j - i);
            if (chord < best) best = chord;
        }
    return best;
}

static void check_blocks(const double *gain, uint32_t m, const hull_block *block, size_t count)
{
    double *loss = calloc(m + 1, sizeof *loss), total = 0, pooled = 0, value;
    for (uint32_t i = m; i-- > 0;) loss[i] = loss[i + 1] + gain[i];
    for (uint32_t i = 0; i < m; i++) total += gain[i];
    uint32_t at = 0;
    value = loss[0];
    for (size_t k = 0; k < count; k++) {
        if (k > 0) ck_assert(block[k].slope <= block[k - 1].slope);
        pooled += block[k].sum;
        for (uint32_t i = 0; i < block[k].length; i++) {
            value -= block[k].slope;
            at++;
            ck_assert_double_eq_tol(value, slow_hull(loss, m, at), 1e-12 * (loss[0] + 1e-300) + 1e-300);
            ck_assert(value <= loss[at] + 1e-12 * loss[0]);
        }
    }
    ck_assert_uint_eq(at, m);
    ck_assert(fabs(pooled - total) <= 1e-12 * total);
    free(loss);
}

UNIT_TEST(pava_is_the_lower_hull)
{
    for (int round = 0; round < 40 * CASE_KINDS; round++) {
        double gain[64];
        hull_block block[64];
        uint32_t m = 1 + case_below(64);
        for (uint32_t i = 0; i < m; i++) gain[i] = (double)(float)case_importance((case_kind)(round % CASE_KINDS));
        check_blocks(gain, m, block, pava_blocks(block, gain, m));
    }
}

// Gains that differ in their last bits: comparing products can accept an order that the rounded quotients violate.
UNIT_TEST(slopes_fall_whatever_the_rounding)
{
    for (int round = 0; round < 20000; round++) {
        double gain[24];
        hull_block block[24];
        for (int i = 0; i < 24; i++) gain[i] = 0.1 * (1 + (double)case_below(5) * 0x1p-52);
        size_t count = pava_blocks(block, gain, 24);
        for (size_t k = 1; k < count; k++) ck_assert(block[k].slope <= block[k - 1].slope);
    }
}

UNIT_TEST(published_hull_is_pava_up_to_rounding)
{
    for (int round = 0; round < 200; round++) {
        enum { M = 64 };
        double gain[M];
        hull_block ours[M], theirs[M];
        uint32_t m = 1 + case_below(M);
        // Small whole numbers: f32 sums are exact, so that only collinear points differ, which the published code
        // drops.
        for (uint32_t i = 0; i < m; i++) gain[i] = case_below(round % 2 ? 4 : 1000);
        size_t a = pava_blocks(ours, gain, m), b = published_blocks(theirs, gain, m), k = 0;
        for (size_t j = 0; j < b; j++) {
            uint32_t length = 0;
            for (; length < theirs[j].length; k++) {
                ck_assert_uint_lt(k, a);
                ck_assert((float)ours[k].slope == (float)theirs[j].slope);
                length += ours[k].length;
            }
            ck_assert_uint_eq(length, theirs[j].length);
            ck_assert(theirs[j].slope == (double)(float)theirs[j].slope);
            if (j > 0) ck_assert(theirs[j].slope < theirs[j - 1].slope);
        }
        ck_assert_uint_eq(k, a);
    }
}

UNIT_TEST(feasible_hull_starts_at_the_floor)
{
    cache_shape shape = {2, 2, 400, 0, 1}; // floor 4, 3 of them from the middle
    loss_curves c;
    hulls h;
    case_curves(&c, CASE_HEAVY, &shape);
    hulls_init(&h, &shape);
    help_ok(hulls_fill(&h, &c, HULL_FEASIBLE, err));
    unit_numbers(c.floor, 4, h.first, 3);
    for (uint32_t n = 0; n < 4; n++) check_blocks(c.gain + n * 399 + 3, 396, h.block + n * h.stride, h.count[n]);
    hulls_free(&h);
    loss_curves_free(&c);
}

UNIT_MAIN_EACH("solver_curve", case_seed, NULL)
