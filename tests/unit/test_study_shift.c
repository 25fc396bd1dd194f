// Tables near a table: totals, nesting, caps and ranks hold, shift 0 is the table, and a shifted head moves its way.
#include "study/shift.h"
#include "test_solver_cases.h"

enum { R = 99, LAYERS = 3, HEADS = 4, N = LAYERS * HEADS, KNOTS = 3 };

static const double KNOT[KNOTS] = {0.5, 0.8, 0.9};

typedef struct bed {
    double ratio[R], prune[R * N], shift[KNOTS * N], out[R * N];
    shift_base base;
} bed;

// Makes columns like a solved table's: heads that fall early or late, with sums that match the ratio.
static void bed_make(bed *b)
{
    memset(b, 0, sizeof *b);
    double slow[N];
    for (int h = 0; h < N; h++) slow[h] = exp(2 * case_uniform() - 1);
    for (int r = 0; r < R; r++) {
        double pace = case_pace(slow, N, b->ratio[r] = (r + 1) / 100.0);
        for (int h = 0; h < N; h++) b->prune[r * N + h] = 1 - 1 / (1 + pace * slow[h]);
    }
    b->base = (shift_base){R, LAYERS, HEADS, b->ratio, b->prune, NULL, false};
}

static void draw_shifts(bed *b, double size)
{
    for (int i = 0; i < KNOTS * N; i++) b->shift[i] = size * (2 * case_uniform() - 1);
}

static double sum_of(const double *prune, int first, int n)
{
    double sum = 0;
    for (int h = first; h < first + n; h++) sum += prune[h];
    return sum;
}

static void check_nested(const bed *b)
{
    for (int i = N; i < R * N; i++) ck_assert_msg(b->out[i] >= b->out[i - N] - 1e-12, "row %d, head %d", i / N, i % N);
}

UNIT_TEST(no_shift_is_the_table)
{
    bed b;
    bed_make(&b);
    help_ok(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err));
    ck_assert(memcmp(b.out, b.prune, sizeof b.out) == 0);
    for (int i = 0; i < KNOTS * N; i++) b.shift[i] = 0.7; // common to all heads: the total takes it back
    help_ok(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err));
    for (int i = 0; i < R * N; i++) ck_assert_double_eq_tol(b.out[i], b.prune[i], 1e-9);
}

UNIT_TEST(totals_stay_and_rows_are_nested)
{
    bed b;
    for (int round = 0; round < 20; round++) {
        bed_make(&b);
        draw_shifts(&b, 2);
        b.base.by_layer = round % 2;
        help_ok(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err));
        check_nested(&b);
        for (int r = 0; r < R; r++)
            for (int l = 0; l < LAYERS; l++) {
                int first = b.base.by_layer ? l * HEADS : 0, n = b.base.by_layer ? HEADS : N;
                ck_assert_double_eq_tol(sum_of(b.out + r * N, first, n), sum_of(b.prune + r * N, first, n), 1e-6);
            }
    }
}

UNIT_TEST(a_head_with_a_negative_shift_keeps_more)
{
    bed b;
    bed_make(&b);
    for (int k = 0; k < KNOTS; k++) b.shift[k * N + 5] = -1;
    help_ok(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err));
    for (int r = 10; r < 90; r++) // further on, no column has anything left to give
        for (int h = 0; h < N; h++)
            ck_assert(h == 5 ? b.out[r * N + h] < b.prune[r * N + h] : b.out[r * N + h] > b.prune[r * N + h]);
}

UNIT_TEST(limits_hold)
{
    bed b;
    kvb_limits limits;
    bed_make(&b);
    help_ok(kvb_limits_init(&limits, LAYERS, HEADS, err));
    limits.ranks = 2;
    b.base.limits = &limits;
    draw_shifts(&b, 1.5);
    help_ok(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err));
    check_nested(&b);
    for (int r = 0; r < R; r++)
        for (int rank = 0; rank < 2; rank++) {
            double got = 0, want = 0;
            for (int l = 0; l < LAYERS; l++) {
                got += sum_of(b.out + r * N, l * HEADS + 2 * rank, 2);
                want += sum_of(b.prune + r * N, l * HEADS + 2 * rank, 2);
            }
            ck_assert_double_eq_tol(got, want, 1e-6);
        }
    // A cap: layer 0 never keeps more than its share in the table's row for 40 %.
    limits.ranks = 1;
    double cap = (HEADS - sum_of(b.prune + 39 * N, 0, HEADS)) / HEADS;
    limits.cap[0] = cap;
    for (int h = 0; h < HEADS; h++) b.shift[N + h] = -3;
    help_ok(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err));
    for (int r = 45; r < R; r++) {
        ck_assert(HEADS - sum_of(b.out + r * N, 0, HEADS) <= HEADS * cap + 1e-9);
        ck_assert_double_eq_tol(sum_of(b.out + r * N, 0, N), sum_of(b.prune + r * N, 0, N), 1e-6);
    }
    kvb_limits_free(&limits);
}

UNIT_TEST(what_makes_no_sense_is_refused)
{
    bed b;
    bed_make(&b);
    const double twice[2] = {0.5, 0.5};
    help_fails(shift_table(&b.base, twice, 2, b.shift, b.out, err), KVB_ARGUMENT, "");
    help_fails(shift_table(&b.base, KNOT, 0, b.shift, b.out, err), KVB_ARGUMENT, "");
    b.shift[3] = NAN;
    help_fails(shift_table(&b.base, KNOT, KNOTS, b.shift, b.out, err), KVB_NUMERIC, "");
}

UNIT_MAIN_EACH("study/shift", case_seed, NULL)
